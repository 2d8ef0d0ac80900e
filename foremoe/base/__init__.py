"""What everything else stands on: arrays, fields, errors, threads, compiled functions, tensor files."""
