"""``--trace`` of ``foremoe simulate``: writes timelines of a stage for Perfetto, one with static placement and one planned."""

from collections.abc import Mapping, Sequence
from typing import Any

from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.simulate.result import Simulation
from foremoe.simulate.systems import BALANCED
from foremoe.simulate.trace import trace

STATIC, PREFERRED = "static", "foremoe"
Runs = dict[str, list[tuple[Plan, Simulation]]]


def runs_to_show(names: Sequence[str]) -> Runs:
    """Returns the dict for `simulate_systems` to fill. Its keys are static placement and foremoe, or else the first strategy."""
    planned = [name for name in names if name not in (STATIC, BALANCED)]
    if not planned:
        raise InputError("--trace needs a strategy other than static to show; add one to --planners.")
    return {name: [] for name in (STATIC, PREFERRED if PREFERRED in planned else planned[0]) if name in names}


def write_trace(path: str, kept: Runs, rows: Sequence[Mapping[str, Any]]) -> str:
    """Writes the trace of one EP group, with each of its pipeline ranks, and returns a line that describes it.

    Raises:
        InputError: The strategy did not plan the group, or the file cannot be written.
    """
    for row in rows:
        if row["solver"] in kept and not kept[row["solver"]]:
            raise InputError(f"--trace cannot show {row['solver']}: {row['note'].removeprefix('left out: ')}.")
    runs = {
        name if len(ranks) == 1 else f"{name}, pipeline rank {rank}": run
        for name, ranks in kept.items()
        for rank, run in enumerate(ranks)
    }
    trace(runs).save(path)
    num_ranks = len(next(iter(kept.values())))
    whole = "" if num_ranks == 1 else f" on {num_ranks} pipeline ranks"
    return f"trace: {' and '.join(kept)} of the first EP group{whole}; open it at ui.perfetto.dev"
