"""Common basis: arrays, fields, errors, threads, compiled functions, tensor files."""
