"""Assembly of a plan from finished rows, with bounds, proofs, prices, copies and their links."""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.levels import PathSolver
from foremoe.plan.header import PlanHeader
from foremoe.plan.laws import PROVEN
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import TransferList
from foremoe.planner.answers import linked, valid
from foremoe.problem.bounds import load_bound, row_bound, settled_load_bound
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.pricing import price, row_objective
from foremoe.problem.problem import Problem

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, S slots.


def assemble(
    header: PlanHeader, path: PathSolver, problem: Problem, placement: Placement, stop_N: Array, *,
    proven_N: Array | None = None,
) -> Plan:  # fmt: skip
    """Returns the plan made of finished rows. Their quotas must sum to the load of the problem."""
    M, L, G, S = problem.M, problem.L, problem.G, problem.S
    load_bound_N = load_bound(problem)
    bound_N = row_bound(problem)
    cost = price(problem, placement)
    if proven_N is not None:
        # A solver's bound may come from a floating-point search, so it is capped at the objective that the plan reaches.
        balance = problem.cost.objective == "balance"
        objective_N = row_objective(problem, placement) if balance else cost.total_s
        if balance and header.keeps_homes:
            bound_N = settled_load_bound(problem, objective_N)
        bound_N = np.maximum(bound_N, np.minimum(proven_N, objective_N))
        if balance:
            load_bound_N = bound_N = np.ceil(bound_N - 1e-9)
            # A row that meets a lower bound is proven optimal, whichever solver found it.
            settled_N = (objective_N <= bound_N) & (stop_N != Stop.CANCELLED) & header.keeps_homes
            stop_N = np.where(settled_N, Stop.OPTIMAL, stop_N)
        # A row that no bound proves is not called optimal, whatever the solver says.
        boast_N = (stop_N == Stop.OPTIMAL) & ((objective_N > bound_N * PROVEN) | (not header.keeps_homes))
        stop_N = np.where(boast_N, Stop.DONE, stop_N)
    plan = Plan(
        header=header, home_LE=problem.home_LE, load_MLE=problem.load_MLE,
        expert_MLGS=placement.expert_NGS.reshape(M, L, G, S), quota_MLGS=placement.quotas_NGS.reshape(M, L, G, S),
        transfers=TransferList.none(), cost_ML=cost.reshape(M, L), bound_ML=bound_N.reshape(M, L),
        load_bound_ML=load_bound_N.reshape(M, L), stop_ML=stop_N.reshape(M, L),
    )  # fmt: skip
    return linked(plan.rederived(), path, problem) if header.keeps_homes else valid(plan)
