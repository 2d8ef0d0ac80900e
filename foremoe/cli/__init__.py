"""The command line ``foremoe``, with one file per command. `main` calls the commands."""
