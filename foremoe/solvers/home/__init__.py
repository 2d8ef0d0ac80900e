"""Solvers of the *home* level, which assign experts to home slots."""
