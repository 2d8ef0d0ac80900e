"""Level path: the link of every copy."""
