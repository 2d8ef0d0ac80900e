"""Parts that show on one GPU how foremoe runs there, each with a time limit. See `python -m bench.gpu --help`."""
