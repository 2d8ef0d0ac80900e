"""Functions that read and count the routing that rollout engines return."""
