"""Solvers of the *path* level, which choose the link of every copy."""
