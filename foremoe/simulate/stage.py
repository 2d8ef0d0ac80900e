"""`simulate`: simulates the timeline of a plan for one stage of one EP group. For pipelines, `StageRun` runs pass by pass."""

import dataclasses

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase
from foremoe.simulate import kernel
from foremoe.simulate.prepare import copy_inputs, empty_record, empty_state, return_inputs, stage_inputs, wall_seconds
from foremoe.simulate.result import PARTS, Parts, Simulation

# Letters: M micro-steps, L layers, N rows, G ranks, S slots, U uses, X passes, C copies, A gradient returns, R redundant.


def simulate(
    problem: Problem, plan: Plan, *, prefetch: int = 2, known: str = "rollout", plan_s: float = 0.0, share_links: bool = True,
    outside_s_MG: Array | None = None, full_stores: bool = False,
) -> Simulation:  # fmt: skip
    """Simulates the timeline of a plan on the problem's cluster. It is deterministic and uses the constants of the cost model.

    Ranks run the plan's schedule. In every use, they run attention, wait for the slowest rank, dispatch tokens, wait for the
    weights of their replicas, run experts and combine outputs. Meanwhile, copies start up to `prefetch` uses ahead if their
    buffer is free. Copies run one after another on a link, and pause while an exchange needs it. Replica gradients are returned
    during later uses. The head, moves of homes, gradient reduction and the optimizer are left out. `foremoe.gain` includes them,
    so its speed-up is lower. See docs/simulator.md.

    Args:
        problem: Problem with counts by source rank.
        plan: Plan of this problem. If the plan moves homes, its copies take no time, because such plans are rated only by their
            balance.
        prefetch: How many uses ahead a copy may start at most, as in `Engine`.
        known: "rollout" if the plan is known before the stage. "router" if the load of a layer is known only after its router has
            run, so that planning and the copies for the forward pass are exposed.
        plan_s: Time in seconds of exposed planning per forward pass of a layer.
        share_links: Whether copies wait while exchanges use links of the same class. If False, copies have their own links.
        outside_s_MG: Time in seconds of a forward pass outside the MoE layers (embedding, head, loss), float64. The backward pass
            takes `window_backward_ratio` times as long.
        full_stores: Whether host stores are full when the stage begins, as they are after another stage with the same weights.

    Raises:
        InputError: Plan and problem do not match, or the problem has no counts by source rank.
        PlanError: The plan violates a law.

    Example:
        >>> from foremoe.simulate import simulate
        >>> static, _ = foremoe.resolve("static").plan(problem)
        >>> round(simulate(problem, static).total_s / simulate(problem, plan).total_s, 2)
        1.42
    """
    run = StageRun(
        problem, plan, prefetch=prefetch, known=known, plan_s=plan_s, share_links=share_links,
        full_stores=full_stores,
    )  # fmt: skip
    for x in range(run.num_passes):
        run.run_pass(x, outside_s_MG=outside_s_MG)
    return run.finish()


def force_balanced(problem: Problem, *, outside_s_MG: Array | None = None) -> Simulation:
    """Simulates the stage with even routing of the same tokens and with experts at home, which is the time of perfect balance.

    Example:
        >>> from foremoe.simulate import force_balanced, simulate
        >>> round(force_balanced(problem).total_s / simulate(problem, plan).total_s, 2)
        0.98
    """
    even = even_routing(problem)
    return simulate(even, Planner(rank=()).plan(even)[0], outside_s_MG=outside_s_MG)


def even_routing(problem: Problem) -> Problem:
    """Returns the problem without redundant slots and with the pairs of every source spread evenly over all experts."""
    if problem.load_MLGE is None:
        raise InputError("even routing needs counts by source rank; give the problem its load_MLGE.")
    pairs_MLG = problem.load_MLGE.sum(axis=3, dtype=np.int64)
    # Each source continues where the previous one stopped, so that experts differ by at most one pair.
    first_MLG = np.cumsum(pairs_MLG, axis=2) - pairs_MLG
    E = problem.E
    rest_MLGE = (np.arange(E) - first_MLG[..., None]) % E < (pairs_MLG % E)[..., None]
    load_MLGE = (pairs_MLG // E)[..., None] + rest_MLGE
    return dataclasses.replace(
        problem, load_MLGE=load_MLGE, load_MLE=load_MLGE.sum(axis=2), redundant=0,
        home_LE=np.tile(np.arange(E), (problem.L, 1)), routed=None,
    )  # fmt: skip


class StageRun:
    """A stage that runs pass by pass. `simulate` runs the passes in order. A pipeline runs them as their dependencies allow.

    Attributes:
        num_passes: Number of passes in the schedule.
        micro_step_X: Micro-step of each pass, int32.
    """

    def __init__(
        self, problem: Problem, plan: Plan, *, prefetch: int = 2, known: str = "rollout", plan_s: float = 0.0,
        share_links: bool = True, full_stores: bool = False,
    ) -> None:  # fmt: skip
        if plan.load_MLE.shape != problem.load_MLE.shape or (plan.load_MLE != problem.load_MLE).any() or plan.G != problem.G:
            raise InputError("the plan's load differs from the problem's; simulate the plan of this problem.")
        if prefetch < 0 or plan_s < 0:
            raise InputError(f"prefetch and plan_s must be at least 0; got {prefetch} and {plan_s}.")
        if known not in ("rollout", "router"):
            raise InputError(f'known must be "rollout" or "router"; got {known!r}.')
        depths = plan.header.slot_depth, problem.slot_depth
        for name, mine, its in (("slots per rank", plan.S, problem.S), ("slot_depth", *depths)):
            if mine != its:
                raise InputError(f"the plan has {name} {mine} and the problem {its}; simulate the plan of this problem.")
        plan.check()
        self.problem, self.plan = problem, plan
        schedule = plan.header.schedule
        self._uses = schedule.uses(plan.L)
        self.micro_step_X, self._phase_X = schedule.micro_step_X, schedule.phase_X
        self.num_passes = len(self._phase_X)
        self._first_X = np.searchsorted(self._uses.pass_U, np.arange(self.num_passes + 1))
        num_uses = len(self._uses.use_U)
        self._stage, self._exchange_busy_WG = stage_inputs(problem, plan, self._uses, plan_s, share_links)
        self._copies = copy_inputs(problem, plan, num_uses, prefetch, known)
        if full_stores:
            self._copies.fills.end_F[:] = 0.0
        self._returns, self._returned = return_inputs(plan)
        self._state, self._record = empty_state(problem, self._stage), empty_record(num_uses, problem.G)

    def run_pass(self, x: int, ready_s: float = 0.0, outside_s_MG: Array | None = None) -> float:
        """Runs pass `x`, which starts at `ready_s` or later, and returns the time of its end. Passes must run in order."""
        state, ratio = self._state, self._stage.window_ratio
        kernel.hold(ready_s, kernel.BUBBLE, state)
        backward = self._phase_X[x] == Phase.BACKWARD
        outside_G = np.zeros(self.problem.G)
        if outside_s_MG is not None:
            outside_G += np.asarray(outside_s_MG, np.float64)[self.micro_step_X[x]]
        if backward:
            kernel.work(ratio * outside_G, kernel.OUTSIDE, state)
        low, high = int(self._first_X[x]), int(self._first_X[x + 1])
        kernel.run_uses(low, high, self._stage, self._copies, self._returns, state, self._record)
        if not backward:
            kernel.work(outside_G, kernel.OUTSIDE, state)
        return float(state.clock[kernel.NOW])

    def settled_s(self) -> float:
        """Returns the time at which all passes that have run are over and their replica gradients have arrived at home."""
        return max(float(self._state.clock[kernel.NOW]), float(self._return_seconds()[1].max(initial=0.0)))

    def finish(self, end_s: float = 0.0) -> Simulation:
        """Waits for the last gradient returns, and until `end_s` if other pipeline ranks take longer. Returns the simulation."""
        state, record = self._state, self._record
        start_A, end_A = self._return_seconds()
        kernel.hold(float(end_A.max(initial=0.0)), kernel.GRADIENT, state)
        kernel.hold(end_s, kernel.BUBBLE, state)
        copies, returned, uses = self._copies, self._returned, self._uses
        return_micro_step_A, return_layer_A = np.divmod(returned.row_Z, self.plan.L)
        start_U, window_U, dispatched_U, ready_U, computed_U, end_U = record.time_6U
        end_C = wall_seconds(copies.end_C, copies.link_C, record)
        if len(end_C):
            # Rounding of clocks must not put the end of a copy after the experts that waited for it.
            end_C = np.minimum(end_C, ready_U[self.plan.transfers.need_C])
        return Simulation(
            micro_step_U=uses.micro_step_U, layer_U=uses.layer_U, phase_U=uses.phase_U, start_U=start_U, window_U=window_U,
            dispatched_U=dispatched_U, ready_U=ready_U, computed_U=computed_U, end_U=end_U, window_UG=record.window_UG,
            wait_UG=record.wait_UG, compute_UG=record.compute_UG,
            copy_start_C=wall_seconds(copies.start_C, copies.link_C, record, begin=True), copy_end_C=end_C,
            return_micro_step_A=return_micro_step_A, return_layer_A=return_layer_A, return_expert_A=returned.expert_Z,
            return_src_A=returned.rank_Z, return_dst_A=returned.home_Z, return_start_A=start_A, return_end_A=end_A,
            link_busy_WG=state.busy_WG + self._exchange_busy_WG,
            parts=Parts(**dict(zip(PARTS, state.parts.tolist(), strict=True))),
        )  # fmt: skip

    def _return_seconds(self) -> tuple[Array, Array]:
        """Returns the times when every gradient was sent and arrived at its home."""
        returns, node_G = self._returns, self._stage.node_G
        link_A = np.where(node_G[returns.src_A] == node_G[returns.dst_A], int(Link.PEER), int(Link.RDMA))
        start_A = wall_seconds(returns.start_A, link_A, self._record, begin=True)
        return start_A, wall_seconds(returns.end_A, link_A, self._record)
