"""The command line ``foremoe``. Each command has its own file, and `main` calls the commands."""
