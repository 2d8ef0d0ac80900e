"""The exact solver, which solves placement and split together as one mixed-integer program."""
