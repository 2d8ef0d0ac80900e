"""Solvers of the *pack* level, which assign sequences to micro-steps and ranks."""
