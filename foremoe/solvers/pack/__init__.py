"""Level pack: sequences to micro-steps and ranks."""
