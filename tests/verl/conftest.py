import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "megatron"):
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def pool():
    """Ranks of their own: Megatron-Core on CPU changes the process for good, and veRL takes long to import."""
    from pools import forked_from

    with forked_from(HERE / "verl_loaded_once.py") as pools:
        yield pools
