"""warm_up: nothing that a first plan runs is left to compile, and compiling is not counted as planning."""

import subprocess
import sys
import time

from numba import njit

import foremoe
from foremoe.base.compiled import watch_compilation
from foremoe.planner.summary import Stopwatch

FIRST_USE = """
import sys
import numpy as np
import foremoe
from numba.core.dispatcher import Dispatcher
from foremoe.distributed.planning import PlanningTask, plan_together
from foremoe.routing.readers.counting import count_micro_steps
from foremoe.simulate import simulate
from foremoe.testing.ranks import run_threads

def compiled():
    found = {id(d): d for name, module in list(sys.modules.items()) if name.startswith("foremoe") for d in vars(module).values()
             if isinstance(d, Dispatcher)}
    return {f"{d.py_func.__name__}{signature}" for d in found.values() for signature in d.signatures}

foremoe.warm_up()
before = compiled()
trace = foremoe.synthetic_trace("gpt-oss-20b", num_sequences=96, mean_length=60.0, num_layers=3, seed=1)
payloads = np.split(trace.topk_TLK.astype(np.int16), trace.cuts[1:-1])
again, _ = foremoe.from_routed_experts(payloads, model="gpt-oss-20b", moe_layer_L=trace.moe_layer_L)
for dtype in (np.uint8, np.int16, np.int32, np.int64):  # as trainers hand over the routing of their micro-batches
    count_micro_steps([payload.astype(dtype) for payload in payloads], 32)
work = foremoe.Workload.from_trace(again, num_ranks=8, tokens_per_rank=128)
for ranks_per_node in (8, 4):
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=8, ranks_per_node=ranks_per_node)
    for redundant in (1, 2):
        problem = foremoe.Problem.of(work, cluster, redundant=redundant)
        plan, summary = foremoe.Planner().plan(problem)
        assert summary.compile_s == 0.0
        plan.check(problem)
        plan.rows_for(work, 3)
        simulate(problem, plan)
        foremoe.advise(problem)
        foremoe.Planner().plan(problem.with_load(problem.load_MLE))
    task = PlanningTask(
        model=problem.model, cluster=cluster, stage=work.stage, schedule=problem.schedule, redundant=1,
        moe_layer_L=work.moe_layer_L, home_LE=problem.home_LE,
    )
    tokens_MG = work.tokens_MG.astype(np.int64)
    run_threads(lambda g: plan_together(g, foremoe.Planner(), task, work.load_MLGE[:, :, g.rank], tokens_MG[:, g.rank]), 8)
print(sorted(compiled() - before))
"""


def test_after_warm_up_a_first_plan_compiles_nothing():
    found = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


def test_compiling_is_seen_and_is_not_planning():
    @njit
    def add(a, b):
        return a + b

    names, begin_s, watch = [], time.perf_counter(), Stopwatch()
    with watch_compilation(names.append):
        assert add(1, 2) == 3 and add(1.0, 2.0) == 3.0 and add(2, 2) == 4
    assert add(1, 2.0) == 3.0
    assert names == ["add", "add"]
    compile_s, (wall_s, _) = watch.compile_s(), watch.spent()
    assert compile_s > 0.0 <= wall_s <= time.perf_counter() - begin_s - compile_s


def test_warm_up_is_public():
    assert callable(foremoe.warm_up) and "warm_up" in foremoe.__all__
