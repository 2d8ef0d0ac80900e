"""Solvers of the *split* level, which set quotas for given replicas."""
