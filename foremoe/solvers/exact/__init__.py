"""The exact solver: placement and split as one mixed-integer program."""
