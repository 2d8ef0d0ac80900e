"""Readers of what rollout engines return, and the pass that counts it."""
