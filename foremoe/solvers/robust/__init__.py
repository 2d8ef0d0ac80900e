"""Solvers for loads that are not known when replicas are placed."""
