"""Solvers of the *split* level, which divide pairs over given replicas."""
