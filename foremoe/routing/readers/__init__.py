"""Readers and counters of the routing that rollout engines return."""
