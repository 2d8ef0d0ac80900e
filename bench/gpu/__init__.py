"""Programs that show how foremoe runs on one GPU, each with a time limit. See `python -m bench.gpu --help`."""
