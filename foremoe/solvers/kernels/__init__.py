"""Compiled row kernels that call each other: the search behind `Chain` and `NodeChain`."""
