"""Level split: quotas of replicas that are placed."""
