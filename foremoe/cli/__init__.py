"""The command line ``foremoe``: one file per command; `main` runs it."""
