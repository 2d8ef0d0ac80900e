"""Levels node and rank: replicas and quotas of every row."""
