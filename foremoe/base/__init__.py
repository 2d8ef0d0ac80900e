"""The ground floor: arrays, fields, errors, threads, compiled functions, tensor files."""
