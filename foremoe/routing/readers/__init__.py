"""Reads the routing that rollout engines return, and counts it."""
