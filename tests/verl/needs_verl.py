"""Skips the module that imports it where veRL is not installed."""

from importlib.util import find_spec

import pytest

# This folder is called verl, too, and may be on the path: a package of that name has a file of its own.
_spec = find_spec("verl")
if _spec is None or _spec.origin is None:
    pytest.skip("verl is not installed; make test-verl installs it", allow_module_level=True)
