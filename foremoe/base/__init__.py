"""Foundations of the package: arrays, fields, errors, threads, compiled functions and tensor files."""
