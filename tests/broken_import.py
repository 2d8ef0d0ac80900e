"""The beginning of a program in which the import of one module fails."""

# To be formatted with `module`, and `error`, the exception's name.
BROKEN = """
import sys

class Broken:
    def find_spec(name, *_):
        if name == {module!r}:
            raise {error}("made to fail")

sys.meta_path.insert(0, Broken)
"""
