"""Compiled row kernels that call each other."""
