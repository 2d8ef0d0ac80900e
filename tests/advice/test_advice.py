"""Slots that pay are chosen, the next change is named, and samples say what whole stages do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import foremoe
from foremoe.advice import Case, advise, choose_slots
from foremoe.advice.changes import DO_NOT_RECOMPUTE, RECOMPUTE, stage_seconds
from foremoe.advice.sample import sample, whole_stage
from foremoe.machine.trainer import Trainer
from foremoe.planner.planner import Planner
from foremoe.problem.memory import gigabytes
from foremoe.problem.problem import Problem
from foremoe.simulate import Judge, System, simulate, simulate_systems
from foremoe.synthetic import Regime

EVEN = Regime(sigma=0.0, kappa=1e9, walk_std=0.0, domain_std=0.0, sequence_std=0.0, source_kappa=1e9)


def posed(
    regime: str | Regime, *, layers: int = 3, micro_steps: int = 3, dispatch: str = "node", tokens_per_rank: int = 4096,
    **options: object,
) -> Problem:  # fmt: skip
    work = foremoe.synthetic_workload(
        "gpt-oss-20b", num_ranks=8, tokens_per_rank=tokens_per_rank, micro_steps=micro_steps, num_layers=layers, regime=regime,
        seed=2,
    )  # fmt: skip
    cluster = foremoe.Cluster.preset("8xh100", 8, dispatch=dispatch)
    return foremoe.Problem.of(work, cluster, redundant=1, **options)  # type: ignore[arg-type]


def test_slots_are_taken_while_each_shortens_the_stage_by_a_hundredth() -> None:
    chosen = choose_slots(posed("gpt-oss-math-like"))
    numbers = [option.redundant for option in chosen.options]
    assert numbers == sorted(numbers) and {0, 1, 2} <= {*numbers} <= {0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32}
    assert chosen.redundant in numbers
    speed = {option.redundant: option.speedup for option in chosen.options}
    assert speed[chosen.redundant] > 1.3
    last = numbers[-1]
    assert speed[last] / speed[chosen.redundant] - 1.0 < 0.01 * (last - chosen.redundant), "the last that was tried did not pay"
    fewer = max(number for number in numbers if number < chosen.redundant)
    assert speed[chosen.redundant] / speed[fewer] - 1.0 >= 0.01 * (chosen.redundant - fewer), "every slot pays"
    assert str(chosen).startswith(f"slots: R = {chosen.redundant}, from a sample of rows (0: 1.00x, 1: ")
    assert (chosen.problem.load_MLE is posed("mid").load_MLE) is False and chosen.redundant == chosen.problem.R


def test_more_slots_than_homes_where_tokens_reach_fewer_nodes_with_them() -> None:
    work = foremoe.synthetic_workload(
        "qwen3-30b-a3b", num_ranks=64, tokens_per_rank=4096, micro_steps=2, num_layers=2, regime="mild", seed=2
    )
    chosen = choose_slots(foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", 64, dispatch="node")))
    speed = {option.redundant: option.speedup for option in chosen.options}
    assert chosen.redundant >= 4 > chosen.problem.B == 2 and speed[4] > 1.15 * speed[1]


def test_numbers_that_gain_nothing_are_passed_where_more_gain_much() -> None:
    work = foremoe.synthetic_workload(
        "qwen3-30b-a3b", num_ranks=64, tokens_per_rank=8192, micro_steps=1, num_layers=1, regime=EVEN, seed=7
    )
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", 64, dispatch="node"))
    chosen = choose_slots(problem)
    speed = {option.redundant: option.speedup for option in chosen.options}
    assert speed[2] > 1.2 and speed[4] < speed[2] + 0.02 and speed[8] > 1.5
    # Six slots and two homes on each of 16 ranks hold all 128 experts, so that two more slots gain nothing.
    assert chosen.redundant == 6 and speed[6] > 0.98 * speed[8]
    # Where eight do not fit, six are not passed over.
    buffers = {option.redundant: option.buffer_bytes for option in chosen.options}
    home = dataclasses.replace(problem, redundant=0)
    peak = foremoe.problem.memory.fit(home, home.static(), trainer=Trainer()).peak_bytes
    room = dataclasses.replace(problem.cluster, memory_bytes=peak + 2 * buffers[6] + buffers[1])
    tight = choose_slots(dataclasses.replace(problem, cluster=room))
    assert [(o.redundant, o.fits) for o in tight.options][-2:] == [(6, True), (8, False)] and tight.redundant == 6
    inside = choose_slots(dataclasses.replace(problem, replicas="node"))
    assert [option.redundant for option in inside.options] == [0, 1] and inside.redundant == 0


def test_even_routing_takes_no_slot_and_is_told_so() -> None:
    problem = dataclasses.replace(posed(EVEN), redundant=0)
    assert choose_slots(problem).redundant == 0
    found = advise(problem)
    assert str(found).startswith("do not use foremoe here: it would gain 0.") and found.speedup < 1.02


def test_slots_that_do_not_fit_are_not_taken() -> None:
    problem = posed("gpt-oss-math-like")
    home = dataclasses.replace(problem, redundant=0)
    peak = int(foremoe.problem.rank_memory(home, home.static()).peak_G.max())
    full = dataclasses.replace(problem.cluster, memory_bytes=peak + 1)
    chosen = choose_slots(dataclasses.replace(problem, cluster=full))
    assert chosen.redundant == 0 and [option.fits for option in chosen.options] == [True, False]
    assert "does not fit" in str(chosen)
    # Where nothing fits, slots are not what has to change.
    small = dataclasses.replace(problem.cluster, memory_bytes=peak // 2)
    assert choose_slots(dataclasses.replace(problem, cluster=small)).redundant > 0


def test_a_problem_without_sources_has_no_simulated_stage() -> None:
    problem = posed("mid")
    with pytest.raises(foremoe.InputError, match="counts by source rank"):
        choose_slots(problem.with_load(problem.load_MLE))


def test_slots_come_first_and_recomputation_before_them_where_the_stage_does_not_fit() -> None:
    problem = dataclasses.replace(posed("gpt-oss-math-like"), redundant=0)
    found = advise(problem)
    assert found.best is not None and found.best.name == f"R = {found.slots.redundant}"
    assert str(found) == f"{found.best.name}: {found.best.speedup - 1:.1%} more tokens per second ({found.best.cost})"
    assert {change.name for change in found.changes} >= {"R = 1", RECOMPUTE}
    again = next(change for change in found.changes if change.name == RECOMPUTE)
    peak = int(foremoe.problem.rank_memory(again.case.problem, again.case.problem.static()).peak_G.max())
    tight = dataclasses.replace(problem.cluster, memory_bytes=peak + 2**20)
    told = advise(dataclasses.replace(problem, cluster=tight))
    assert not told.fit.fits and str(told).startswith(f"{RECOMPUTE}: the stage does not fit without it (then ")


def test_a_stage_fits_if_it_fits_with_the_planned_load() -> None:
    problem = posed("gpt-oss-math-like", tokens_per_rank=32768)
    plan, _ = Planner().plan(problem)
    planned, home = (foremoe.problem.memory.fit(problem, p).peak_bytes for p in (plan.placement, problem.static()))
    assert planned < home
    told = advise(dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, memory_bytes=planned)))
    assert told.fit.peak_bytes == planned and told.fit.fits and "does not fit" not in str(told)


def test_what_takes_more_memory_is_not_advised_where_nothing_fits() -> None:
    problem = posed("mid")
    problem = dataclasses.replace(problem, schedule=dataclasses.replace(problem.schedule, reforward=True))
    peak = int(foremoe.problem.rank_memory(problem, problem.static()).peak_G.max())
    small = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, memory_bytes=peak // 2))
    told = advise(small)
    found = next(change for change in told.changes if change.name == DO_NOT_RECOMPUTE)
    assert found.speedup > 1.0 and told.best is not found
    assert not told.fits_bare and not any(change.fits for change in told.changes)
    needed, whole = told.fit.peak_bytes, told.fit.memory_bytes
    assert str(told).startswith(f"does not fit: needs {gigabytes(needed)} of {gigabytes(whole)} GB, and no change")


def test_a_sample_of_a_small_problem_is_the_problem_and_tells_its_whole_stage() -> None:
    problem = posed("mid")
    assert sample(problem) is problem
    plan, _ = Planner().plan(problem)
    run = simulate(problem, plan)
    whole = whole_stage(problem, problem, run, Trainer())
    judge = Judge.of(problem)
    assert whole.seconds(problem.M) == pytest.approx(judge(problem, plan)["simulated_stage_s"], rel=2e-3)


def test_a_sample_tells_a_long_stage_within_a_few_hundredths() -> None:
    problem = posed("gpt-oss-math-like", layers=16, micro_steps=10)
    part = sample(problem)
    assert (part.M, part.L) == (6, 12)
    case = Case(problem, Trainer())
    found_s = stage_seconds(case, case)
    whole_s = Judge.of(problem)(problem, Planner().plan(problem)[0])["simulated_stage_s"]
    assert found_s == pytest.approx(whole_s, rel=0.03)


def test_a_sample_is_deep_enough_to_see_copies_that_queue_up() -> None:
    """The same rank is the fullest in all layers, and a gradient takes longer on its way home than a short row computes."""
    load_E = np.exp(np.linspace(3.0, 0.0, 32))
    load_ME = np.random.default_rng(0).multinomial(4 * 256, load_E / load_E.sum(), size=(4, 24, 8))
    work = foremoe.Workload.from_counts(load_ME.astype(np.int32), num_topk=4, model="gpt-oss-20b")
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", 8), redundant=1)
    speedup = Judge.of(problem)(problem, Planner().plan(problem)[0])["speedup_vs_static"]
    assert speedup < 0.95 and choose_slots(problem).redundant == 0
    told = str(advise(problem).of_stage(speedup, None))
    assert told == f"do not use foremoe here: the stage would take {1.0 / speedup - 1.0:.1%} longer"


def test_other_homes_are_tried_on_the_same_rows() -> None:
    problem = posed("gpt-oss-like", layers=16, micro_steps=10)
    away = dataclasses.replace(problem, home_LE=np.flip(problem.home_LE, axis=1).copy())
    rows = sample(away, skewed=problem)
    assert (rows.load_MLE == sample(problem).load_MLE).all() and (rows.home_LE != sample(problem).home_LE).any()


def test_moves_of_homes_are_in_the_stage_that_has_them() -> None:
    problem = posed("mid")
    home_LE = problem.home_LE.copy()
    home_LE[:, [0, problem.B]] = home_LE[:, [problem.B, 0]]
    case, moved = Case(problem, Trainer()), Case(dataclasses.replace(problem, home_LE=home_LE), Trainer())
    free = Case(moved.problem, Trainer())
    charge_s = stage_seconds(moved, case) - stage_seconds(free, free)
    per_expert = problem.model.expert_bytes + 12 * problem.model.expert_params
    assert charge_s == pytest.approx(problem.L * problem.cluster.copy_seconds(per_expert)[0])


def test_more_micro_steps_are_compared_by_tokens() -> None:
    problem = posed("mid", micro_steps=4)
    case, half = Case(problem, Trainer()), Case(problem[:2], Trainer())
    assert stage_seconds(half, case) == pytest.approx(stage_seconds(case, case), rel=0.1)
    assert np.isclose(stage_seconds(half, half), stage_seconds(case, case) / 2, rtol=0.2)


def test_a_stage_that_takes_no_time_has_no_gain() -> None:
    work = foremoe.Workload.from_counts(np.zeros((2, 2, 8, 32), np.int32), num_topk=4, model="gpt-oss-20b")
    cluster = dataclasses.replace(
        foremoe.Cluster.preset("8xh100", 8), slot_overhead_s=0.0, layer_overhead_s=0.0, host_layer_s=0.0, peer_latency_s=0.0
    )
    problem = foremoe.Problem.of(work, cluster, redundant=1)
    case = Case(problem, Trainer(optimizer_bytes=0.0))
    assert np.isfinite(stage_seconds(case, case)) and choose_slots(problem).redundant == 0


@pytest.mark.parametrize(("layers", "pp"), [(5, 2), (5, 4), (6, 4), (8, 4)])
def test_a_pipeline_is_estimated_as_it_is_simulated(layers: int, pp: int) -> None:
    """Even if the first ranks have one layer more than the last."""
    problem = posed("mid", layers=layers, micro_steps=8)
    (row,) = simulate_systems([problem], {"foremoe": System(planner=Planner())}, pp=pp)
    case = Case(problem, Trainer(), pp)
    assert stage_seconds(case, case) == pytest.approx(row["simulated_stage_s"], rel=0.04)


def test_no_layout_is_recommended_that_does_not_fit_and_one_that_does_is_a_cure() -> None:
    problem = posed("mid")
    peak = int(foremoe.problem.rank_memory(problem, problem.static()).peak_G.max())
    small = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, memory_bytes=peak // 8))
    quick = dataclasses.replace(small, cluster=dataclasses.replace(small.cluster, flops_per_s=2 * small.cluster.flops_per_s))
    roomy = dataclasses.replace(small, cluster=problem.cluster)
    told = advise(small, redealt={"quick": Case(quick, Trainer())})
    assert next(c for c in told.changes if c.name == "quick").speedup > 1.2 and (told.best is None or told.best.name != "quick")
    told = advise(small, redealt={"quick": Case(quick, Trainer()), "roomy": Case(roomy, Trainer())})
    assert str(told) == "roomy: the stage does not fit without it (other micro-steps)"


def test_a_layout_is_not_called_better_within_its_error() -> None:
    found = advise(posed("mid"), redealt={"EP 8 x PP 3": Case(posed("mid"), Trainer(), 3)})
    layout = next(change for change in found.changes if change.cost.startswith("another layout"))
    assert layout.name == "EP 8 x PP 3" and layout.cost.endswith(", ±5 %")
    within, beyond = (dataclasses.replace(layout, speedup=speedup) for speedup in (1.03, 1.05))
    assert dataclasses.replace(found, changes=(within,)).best is None
    assert dataclasses.replace(found, changes=(beyond,)).best is beyond
    whole = found.of_stage(1.5, 0.94)
    assert whole.beside_even == "even routing would gain 6.4% more"
    assert found.of_stage(1.5, 1.25).beside_even == "the plan is 25.0% faster than even routing without slots"


def test_a_change_that_gains_more_than_the_slots_is_named_behind_them() -> None:
    problem = dataclasses.replace(posed("gpt-oss-math-like"), redundant=0)
    faster = dataclasses.replace(problem.cluster, flops_per_s=9 * problem.cluster.flops_per_s)
    quick = dataclasses.replace(problem, cluster=faster, redundant=1)
    found = advise(problem, redealt={"EP 4": Case(quick, Trainer())})
    other = next(change for change in found.changes if change.name == "EP 4")
    assert found.best is not None and found.best.name.startswith("R = ") and other.speedup > found.best.speedup + 0.01
    assert str(found).endswith(f"; EP 4 would gain {other.speedup - 1:.1%} (other micro-steps)")
    assert "EP 4" not in str(advise(problem, redealt={"EP 4": Case(problem, Trainer())}))
