"""The command line ``foremoe``: one file per command; `main` dispatches to them."""
