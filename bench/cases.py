"""Named, seeded benchmark cases. A case has a workload, a cluster and R. Recorded traces are used if they are available."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.routing.trace import RoutingTrace
from foremoe.synthetic.counts import synthetic_workload
from foremoe.workload.workload import Workload

# Recorded routing lies beside a checkout where somebody has it; the cases that need it are skipped elsewhere.
RECORDED = Path(__file__).resolve().parents[1].parent / "shared" / "data"
ESFT = ("esft_intent.npz", "esft_law.npz", "esft_summary.npz", "esft_translation.npz")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of cases: where the load comes from (`kind` "recorded" or "synthetic") and on how many ranks it is balanced."""

    name: str
    kind: str
    about: str
    num_ranks: int
    redundant: int = 1
    cluster: str = "8xh100"
    files: tuple[str, ...] = ()
    make: Callable[[], Workload]

    @property
    def missing(self) -> str | None:
        """Why the case cannot run here, or None."""
        absent = [name for name in self.files if not (RECORDED / name).exists()]
        return f"recorded traces {', '.join(absent)} are not here" if absent else None

    def problem(self, objective: str) -> Problem:
        """The case as a problem under `objective`."""
        cluster = Cluster.preset(self.cluster, num_ranks=self.num_ranks)
        return Problem.of(self.make(), cluster, redundant=self.redundant, cost=CostModel(objective=objective))


def _recorded(name: str, files: tuple[str, ...], model: str, num_ranks: int, tokens_per_rank: int, about: str) -> Case:
    def make() -> Workload:
        trace = RoutingTrace.concat([RoutingTrace.load(RECORDED / file, model=model) for file in files])
        return Workload.from_trace(trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank)

    return Case(name=name, kind="recorded", about=about, num_ranks=num_ranks, files=files, make=make)


def _synthetic(name: str, model: str, num_ranks: int, regime: str, about: str, redundant: int = 1, tokens: int = 8192) -> Case:
    def make() -> Workload:
        preset = Model.preset(model)
        return synthetic_workload(preset, num_ranks=num_ranks, tokens_per_rank=tokens, micro_steps=4, regime=regime, seed=0)

    return Case(name=name, kind="synthetic", about=about, num_ranks=num_ranks, redundant=redundant, make=make)


def _balanced() -> Workload:
    """The do-no-harm case: routing so even that nothing should be copied."""
    model = Model.preset("qwen3-30b-a3b")
    rng = np.random.default_rng(0)
    load_MLGE = rng.poisson(512.0, (4, 12, 16, model.num_experts)).astype(np.int32)
    return Workload.from_counts(load_MLGE, num_topk=model.num_topk, model=model.name)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _recorded("gpt-oss-ep16", ("gpt_oss_20b_decode.npz",), "gpt-oss-20b", 16, 1024, "gpt-oss-20b responses to 11 data sets"),
        _recorded("esft-ep8", ESFT, "deepseek-v2-lite", 8, 256, "four tasks one after the other, DeepSeek-V2-Lite variant"),
        _recorded("esft-ep16", ESFT, "deepseek-v2-lite", 16, 256, "the same on 16 ranks"),
        _synthetic("qwen3-30b-ep64", "qwen3-30b-a3b", 64, "mid", "128 experts, 8192 tokens per rank"),
        _synthetic("deepseek-v3-ep64", "deepseek-v3", 64, "mid", "256 experts, 8192 tokens per rank"),
        Case(name="balanced-ep16", kind="synthetic", about="do no harm: even routing", num_ranks=16, make=_balanced),
    )
}
