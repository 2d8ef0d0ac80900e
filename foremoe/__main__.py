"""``python -m foremoe``: the command line."""

from foremoe.cli.main import main

if __name__ == "__main__":
    main()
