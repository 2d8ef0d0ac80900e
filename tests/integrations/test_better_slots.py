"""A job is told once, in one sentence, of a number of redundant slots that would serve it better."""

import dataclasses
import logging
import threading

import foremoe
from foremoe.integrations.better_slots import HOMES, SlotAdvice, better_homes, better_slots
from foremoe.simulate import Judge
from foremoe.solvers.home.price import price_L


def problem_of(regime: str, redundant: int, **options: object) -> foremoe.Problem:
    work = foremoe.synthetic_workload(
        "qwen3-30b-a3b", num_ranks=16, tokens_per_rank=4096, micro_steps=2, num_layers=2, regime=regime, seed=1
    )
    return foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", 16), redundant=redundant, **options)  # type: ignore[arg-type]


def said(problem: foremoe.Problem, caplog) -> list[tuple[int, str]]:  # type: ignore[no-untyped-def]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="foremoe"):
        advice = SlotAdvice()
        advice.say(problem)
        advice.say(problem)
        for thread in threading.enumerate():
            if thread.name == "choosing slots":
                thread.join()
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_more_slots_that_pay_are_a_warning_and_fewer_a_note(caplog) -> None:  # type: ignore[no-untyped-def]
    problem = problem_of("mid", 1)
    choice = foremoe.choose_slots(problem)
    assert choice.redundant > 1, "a case in which more slots pay"
    ((level, text),) = said(problem, caplog)
    assert level == logging.WARNING and text.startswith(better_slots(choice, problem))
    assert text.startswith(f"redundant={choice.redundant} in place of 1 would make this update ") and "% shorter, for " in text
    assert problem.cluster.standing in text
    assert said(choice.problem, caplog) == []
    tried = choice.options[-1].redundant
    if tried > choice.redundant:
        ((level, text),) = said(dataclasses.replace(problem, redundant=tried), caplog)
        assert level == logging.INFO and f"in place of {tried} would make this update" in text


def test_nothing_is_said_where_seconds_were_not_asked_for_or_cannot_be_simulated(caplog) -> None:  # type: ignore[no-untyped-def]
    assert said(problem_of("mid", 1, cost=foremoe.CostModel(objective="balance")), caplog) == []
    scored = foremoe.synthetic_workload(
        "qwen3-30b-a3b", num_ranks=4, tokens_per_rank=64, micro_steps=1, stage="recompute", regime="mid"
    )
    assert said(foremoe.Problem.of(scored, foremoe.Cluster.preset("8xh100", 4), redundant=1), caplog) == []
    problem = problem_of("mid", 1)
    assert said(dataclasses.replace(problem, load_MLGE=None), caplog) == []
    assert better_slots(foremoe.choose_slots(problem), dataclasses.replace(problem, redundant=5)) == ""


def test_homes_are_named_where_slots_do_not_fit_and_moving_them_pays(caplog) -> None:  # type: ignore[no-untyped-def]
    roomy = problem_of("skew", 0)
    peak = int(foremoe.problem.rank_memory(roomy, roomy.static()).peak_G.max())
    problem = dataclasses.replace(roomy, cluster=dataclasses.replace(roomy.cluster, memory_bytes=peak + 1))
    choice = foremoe.choose_slots(problem)
    assert choice.redundant == 0 and not choice.options[-1].fits
    home_LE = foremoe.Planner(home=HOMES).homes(problem)
    moved = dataclasses.replace(problem, home_LE=home_LE)
    # The whole stage, with the exchange of weights and float32 gradients.
    runs = Judge.of(problem).run(moved, foremoe.Planner().plan(moved)[0], float(price_L(problem, home_LE, 4.0).sum()))
    shorter = 1.0 - runs.gains()["planned_s"] / runs.gains()["static_s"]
    assert shorter > 0.1
    effect = f"would make this update {shorter:.0%} shorter, if your loop calls moe.homes"
    assert better_homes(choice).endswith(f"experts of a layer {effect}")
    ((level, text),) = said(problem, caplog)
    assert level == logging.WARNING and text.startswith(better_homes(choice) + " (simulated; ")
    assert better_homes(foremoe.choose_slots(roomy)) == "", "slots do as much here"
