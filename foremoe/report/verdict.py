"""The verdict at the top of the page: the gain of the plan, whether the plan fits into memory, and how certain this is."""

from collections.abc import Mapping
from typing import Any

from foremoe.base.shown import seconds_words
from foremoe.machine.cluster import Cluster

EVEN = 1.005  # smaller gains count as none


def verdict(facts: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    """Returns the conclusions of the report in words.

    Returns:
        Dict with ``gain`` (a line), ``details`` (sentences), ``sure`` (a sentence about the basis of the figures), and the bools
        ``gains`` and ``fits``. ``gains`` is True if the plan is faster than static placement and fits into memory.
    """
    gains, memory = _gains(facts), facts["memory"]
    details = []
    if gains.get("share_of_balanced") is not None:
        details.append(f"{gains['share_of_balanced']:.0%} of the speed of force-balanced routing.")
    details.append(_exposed(facts))
    # If the stage does not fit into memory, that comes first.
    details.insert(len(details) if memory["fits"] else 0, f"Memory {memory['verdict']}.")
    if facts.get("advice"):
        details.append(f"Next: {facts['advice']}.")
    if gains.get("step_speedup") is not None:
        details.append(f"The whole step counts {gains['outside_share']:.0%} outside its stages (`--rollout-share`).")
    elif gains.get("step_speedup_at") is not None and gains["speedup_vs_static"] >= EVEN:
        each = ", ".join(f"{gain:.2f}x with {percent} %" for percent, gain in gains["step_speedup_at"].items())
        details.append(
            f"A whole training step gains less: {each} of it outside the stages (set your share with `--rollout-share`)."
        )
    return {
        "gain": _gain(facts, gains), "details": details, "sure": _sure(facts, cluster),
        "gains": bool(gains["speedup_vs_static"] >= EVEN and memory["fits"] and facts["executable"]),
        "fits": bool(memory["fits"]),
    }  # fmt: skip


def _gains(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the gains of the simulated stage, or the predicted gains without a simulation."""
    if facts["simulated"] is not None:
        return dict(facts["simulated"]["gains"])
    head, moves_s = facts["headline"], (facts["moves"] or {"seconds": 0.0})["seconds"]
    planned_s = head["planned_s"] + moves_s
    speedup = head["static_s"] / planned_s if planned_s else 1.0
    return {"static_s": head["static_s"], "planned_s": planned_s, "speedup_vs_static": speedup}


def _gain(facts: Mapping[str, Any], gains: Mapping[str, Any]) -> str:
    stage, speedup, how = facts["stage"], gains["speedup_vs_static"], "simulated" if facts["simulated"] else "predicted"
    change = f"{seconds_words(gains['static_s'])} → {seconds_words(gains['planned_s'])} {how}"
    if not facts["executable"]:
        return f"Homes move, so this plan is scored and never executed: {stage} stage {speedup:.2f}x ({change})."
    if speedup < EVEN:
        told = "Nothing to gain here" if speedup >= 2.0 - EVEN else "Do not use this plan"
        return f"{told}: {stage} stage {speedup:.2f}x as fast as with experts at home ({change})."
    step = "" if gains.get("step_speedup") is None else f"; whole training step {gains['step_speedup']:.2f}x"
    return f"{stage.capitalize()} stage {speedup:.2f}x as fast as with experts at home ({change}){step}."


def _exposed(facts: Mapping[str, Any]) -> str:
    if facts["waited_s"] is not None:
        return f"Exposed: the slowest rank waited {seconds_words(facts['waited_s'])} for copies, measured."
    if facts["headline"]["replicas_per_rank"] == 0:
        return "Nothing is copied."
    simulated = facts["simulated"]
    parts = simulated["parts"]["planned"] if simulated else facts["parts"]["planned"]
    exposed_s, how = parts["transfer_s"] + parts["gradient_s"], "simulated" if simulated else "predicted"
    return f"Copies of weights and gradients add {seconds_words(exposed_s)} ({how}); the rest overlaps with compute."


def _sure(facts: Mapping[str, Any], cluster: Cluster) -> str:
    if cluster.residual is not None and cluster.calibrated:
        return (
            "How certain: the constants were measured on this machine, and their fit misses a measurement by at most"
            f" {cluster.residual:.0%}."
        )
    if cluster.calibrated or cluster.residual is not None:
        return f"How certain: the constants of the machine are {cluster.standing}."
    return (
        "How certain: the constants are data-sheet figures, uncalibrated, so trust ratios more than seconds. `foremoe calibrate`"
        " measures them."
    )
