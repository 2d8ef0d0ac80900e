"""``python -m foremoe``: the command line."""

import sys


def main() -> None:
    """Runs the command line. An interrupt during the imports ends it with exit code 130, like any later interrupt."""
    try:
        from foremoe.cli.main import main as command_line
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
