"""veRL's own Megatron engine on two CPU ranks, without foremoe and with it: the same results, less skew.

    make smoke-verl

A recompute (`infer_batch`) and an update (`train_batch`) of a small GPT with 8 experts, EP2, routing replayed from rollout, over
gloo. What needs GPUs or downloads is left out as in the tests, whose engine this is: hub weights, bridges, flash attention.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "verl"), str(TESTS / "megatron"), str(TESTS)]


def main() -> None:
    """Prints a table; ends with an error if results differ by more than rounding."""
    from program import Layout
    from verl_arms import run

    from foremoe.integrations.settings import Settings
    from foremoe.testing.ranks import RankPool

    arms = {
        "veRL": None,
        "foremoe": Settings(cost="balance"),  # toy sizes gain no predicted time from a replica
        "foremoe, packing": Settings(cost="balance", packing=True),
    }
    with RankPool(2) as pool:
        found = {
            name: pool.run(run, Layout(ep=2), "R3", settings, 1, True, True, timeout_s=120, limit_s=600)[0]
            for name, settings in arms.items()
        }
    plain = found["veRL"]
    rows = {
        "loss": [f"{sum(arm.losses[0]):.6f}" for arm in found.values()],
        "gradient norm": [f"{arm.grad_norms[0]:.6f}" for arm in found.values()],
        "a log-prob differs by at most": [f"{difference(plain, arm):.0e}" for arm in found.values()],
    }
    for name in ("skew_before", "skew_after", "replicas", "drift", "unplanned", "begin_exposed_s"):
        for stage, metrics in (("recompute", 0), ("update", 1)):
            values = [arm.metrics[metrics].get(f"foremoe/{stage}/{name}") if arm.metrics else None for arm in found.values()]
            rows[f"{stage}: {name}"] = ["-" if value is None else f"{value:.4g}" for value in values]
    print("| | " + " | ".join(found) + " |\n|" + " --- |" * (len(found) + 1))
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells) + " |")
    for name, arm in found.items():
        close = (
            abs(sum(arm.losses[0]) / sum(plain.losses[0]) - 1) < 1e-5 and abs(arm.grad_norms[0] / plain.grad_norms[0] - 1) < 1e-4
        )
        if not close or difference(plain, arm) > 1e-4:
            raise SystemExit(f"{name}: results differ from veRL's own.")
    print("Results are the same.")


def difference(one, other) -> float:
    """Largest difference of a log-prob of the recompute stage."""
    return float((one.log_probs[0] - other.log_probs[0]).abs().max())


if __name__ == "__main__":
    main()
