"""``--trace`` of ``foremoe simulate``: writes timelines of a stage for Perfetto, one with static placement and one planned."""

import dataclasses
from collections.abc import Mapping

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.simulate.stage import simulate
from foremoe.simulate.step import head_seconds
from foremoe.simulate.systems import System
from foremoe.simulate.trace import trace

PREFERRED = "foremoe"


def write_trace(path: str, problem: Problem, history_LE: Array | None, systems: Mapping[str, System]) -> str:
    """Writes the trace of one EP group and returns a line that describes it.

    Args:
        systems: Systems to choose from. The trace shows foremoe if it is among them, else the first system that plans.

    Raises:
        InputError: No strategy can be shown, or the file cannot be written.
    """
    planned = {name: system for name, system in systems.items() if name != "static" and not system.even}
    if not planned:
        raise InputError("--trace needs a strategy other than static to show; add one to --planners.")
    name = PREFERRED if PREFERRED in planned else next(iter(planned))
    system = planned[name]
    reason = system.planner.refusal(problem)
    if reason is not None:
        raise InputError(f"--trace cannot show {name}: {reason}.")
    static, _ = Planner(rank=()).plan(problem)
    moved = dataclasses.replace(problem, **system.changes, home_LE=system.planner.homes(problem))
    plan, _ = system.planner.plan(moved, history_LE=history_LE)
    head_s_MG = head_seconds(problem)
    runs = {
        "static": (static, simulate(problem, static, outside_s_MG=head_s_MG)),
        name: (plan, simulate(moved, plan, prefetch=system.prefetch, outside_s_MG=head_s_MG)),
    }
    trace(runs).save(path)
    return f"trace: static and {name} of the first EP group; open it at ui.perfetto.dev"
