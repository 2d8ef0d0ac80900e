"""Level order: the sequence of micro-steps."""
