"""Solvers for loads that are not known yet."""
