"""Pack solvers side by side, alone and together with the home and rank levels; prints markdown.

    python -m bench.packing [CASE ...] [--out bench/results/packing_HARDWARE_DATE.md]

A result file names hardware, date and commit. Loads are token-level: recorded traces where somebody has them, and synthetic
ones with several domains. Times of a stage are the cost model's, uncalibrated; planning times are process CPU seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.cases import ESFT, RECORDED
from bench.output import command_line, emit, hardware
from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.plan.plan import Plan
from foremoe.planner.parsing import short
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.routing.trace import RoutingTrace
from foremoe.solvers import Anneal, AsGiven, BalancedTokens, ExpertAware, HomeSolver, Keep, Lpt, PackSolver
from foremoe.solvers.pack.balanced_tokens import model_of
from foremoe.synthetic.tokens import synthetic_trace
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts, Q sequences.


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trace, and how many ranks and tokens per rank it is packed for."""

    about: str
    num_ranks: int
    tokens_per_rank: int
    ranks_per_node: int = 8
    files: tuple[str, ...] = ()
    make: Callable[[], RoutingTrace]

    def cluster(self) -> Cluster:
        """Ranks of 8xh100 nodes, in nodes of the case's size."""
        return Cluster.preset("8xh100", num_ranks=self.num_ranks, ranks_per_node=self.ranks_per_node)

    def aware(self, skew_weight: float = 0.1, locality: bool = True) -> ExpertAware:
        """The packer told of the case's nodes."""
        redundant = int(skew_weight < 1.0)
        return ExpertAware(skew_weight=skew_weight, redundant=redundant, locality=locality, ranks_per_node=self._nodes())

    def _nodes(self) -> int | None:
        return None if self.ranks_per_node == 8 else self.ranks_per_node


def _recorded(about: str, files: tuple[str, ...], model: str, num_ranks: int, tokens_per_rank: int) -> Case:
    def make() -> RoutingTrace:
        return RoutingTrace.concat([RoutingTrace.load(RECORDED / file, model=model, weights=False) for file in files])

    return Case(about=about, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, files=files, make=make)


def _synthetic(about: str, num_ranks: int, tokens_per_rank: int, regime: str, num_sequences: int, mean_length: float) -> Case:
    def make() -> RoutingTrace:
        return synthetic_trace(
            "qwen3-30b-a3b", num_sequences=num_sequences, mean_length=mean_length, num_layers=8, regime=regime, seed=0
        )

    return Case(about=about, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, make=make)


CASES: dict[str, Case] = {
    "esft-ep8": _recorded("four tasks one after the other, DeepSeek-V2-Lite variant", ESFT, "deepseek-v2-lite", 8, 256),
    "esft-ep16": _recorded("the same on 16 ranks", ESFT, "deepseek-v2-lite", 16, 256),
    "gpt-oss-ep16": _recorded(
        "responses to 11 data sets in their order, gpt-oss-20b", ("gpt_oss_20b_decode.npz",), "gpt-oss-20b", 16, 1024
    ),
    "qwen3-30b-ep16": _synthetic("four domains in runs, regime mid, 8 layers", 16, 8192, "mid", 512, 2000.0),
    "qwen3-30b-ep16-skew": _synthetic("four domains in runs, regime skew, 8 layers", 16, 8192, "skew", 512, 2000.0),
    "qwen3-30b-ep64": _synthetic("four domains in runs, regime mid, 8 layers", 64, 4096, "mid", 1024, 1500.0),
}
CASES["qwen3-30b-ep64-node72"] = dataclasses.replace(
    CASES["qwen3-30b-ep64"], about="the same, all ranks in one node", ranks_per_node=72
)

LIKE_ROUTEPACK = "Lpt homes, then ExpertAware(skew_weight=1.0, locality=False)"


def packed(case: Case, trace: RoutingTrace, packer: PackSolver, home_LE: Array | None = None) -> tuple[Workload, float]:
    """The workload of a packing, and the CPU seconds of the packer: best of three."""
    solve = functools.partial(packer.solve, home_LE=home_LE) if isinstance(packer, ExpertAware) else packer.solve
    seconds = []
    for _ in range(3):
        began = time.process_time()
        micro_step_Q, rank_Q = solve(trace, num_ranks=case.num_ranks, tokens_per_rank=case.tokens_per_rank)
        seconds.append(time.process_time() - began)
    assign = np.repeat(micro_step_Q, trace.seq_len_Q), np.repeat(rank_Q, trace.seq_len_Q)
    return Workload.from_trace(trace, num_ranks=case.num_ranks, assign=assign), min(seconds)


def planned(case: Case, work: Workload, redundant: int, home_LE: Array | None = None) -> Plan:
    """The plan of `Planner()` under ``time``; without redundant slots it is static placement."""
    problem = Problem.of(work, case.cluster(), redundant=redundant, home_LE=home_LE)
    return Planner().plan(problem, num_threads=1)[0]


def stage_ms(plan: Plan) -> float:
    """Predicted milliseconds of the stage: the rows' total."""
    return 1e3 * float(plan.cost_ML.sum().total_s)


def late_attention(trace: RoutingTrace, work: Workload) -> float:
    """Attention of the late rank over the mean, both summed over micro-steps."""
    flops_MG = np.asarray(model_of(trace).attention_flops(work.tokens_MG.astype(np.float64), work.attention_MG))
    return float(flops_MG.max(axis=1).sum() / flops_MG.mean(axis=1).sum())


def markdown(header: tuple[str, ...], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def packers_table(case: Case, trace: RoutingTrace) -> str:
    """Every packer, with static placement and with one redundant slot."""
    given = Problem.of(packed(case, trace, AsGiven())[0], case.cluster(), redundant=0)
    lpt_LE = Lpt().solve(given)
    aware = (case.aware(1.0), case.aware(locality=False), case.aware())
    packers = (AsGiven(), AsGiven(shuffle=True), BalancedTokens(), *aware)
    kinds: list[tuple[str, PackSolver, Array | None]] = [(short(packer), packer, None) for packer in packers]
    kinds.insert(3, (LIKE_ROUTEPACK, case.aware(1.0, locality=False), lpt_LE))
    rows = []
    for name, packer, home_LE in kinds:
        work, seconds = packed(case, trace, packer, home_LE)
        static, balanced = planned(case, work, 0, home_LE), planned(case, work, 1, home_LE)
        cost = balanced.cost_ML.sum()
        share = float(cost.dispatch_s + cost.combine_s) / float(cost.total_s)
        rows.append([
            name, str(work.M), str(work.tokens_MG.max()), f"{late_attention(trace, work):.3f}", f"{static.skew_ML.mean():.3f}",
            f"{stage_ms(static):.1f}", f"{balanced.skew_ML.mean():.3f}", f"{stage_ms(balanced):.1f}", f"{share:.1%}",
            f"{seconds:.3f}",
        ])  # fmt: skip
    header = (
        "packer", "micro-steps", "most tokens on a rank", "late attention", "static skew", "R = 0 ms", "R = 1 skew", "R = 1 ms",
        "dispatch share", "pack s",
    )  # fmt: skip
    return markdown(header, rows)


# Anneal weighs what moving experts costs against this one short stage; Lpt moves them whatever it costs.
HOMES: dict[str, HomeSolver] = {"keep": Keep(), "anneal": Anneal(), "lpt": Lpt()}


def joint_table(case: Case, trace: RoutingTrace) -> str:
    """Pack x home x rank: the predicted time of the stage over that of file order, kept homes, no replicas."""
    variants: dict[tuple[str, str, str], float] = {}
    moved: dict[tuple[str, str], float] = {}
    for rank, redundant in (("none", 0), ("chain", 1)):
        aware = case.aware(1.0) if redundant == 0 else case.aware()
        for pack, packer in (("as given", AsGiven()), ("balanced tokens", BalancedTokens()), ("expert aware", aware)):
            work, _ = packed(case, trace, packer)
            for home in HOMES:
                home_LE = homes(case, work, redundant, home)
                variants[pack, home, rank] = stage_ms(planned(case, work, redundant, home_LE))
                moved[home, rank] = max(moved.get((home, rank), 0.0), moves(home_LE, work))
                if pack == "expert aware" and home != "keep":
                    again, _ = packed(case, trace, packer, home_LE)
                    variants["expert aware, again", home, rank] = stage_ms(planned(case, again, redundant, home_LE))
    base = variants["as given", "keep", "none"]
    names = [(home, rank) for rank in ("none", "chain") for home in HOMES]
    rows = []
    for pack in dict.fromkeys(key[0] for key in variants):
        cells = [variants.get((pack, *name)) for name in names]
        rows.append([pack, *("-" if ms is None else f"{ms / base:.4f}" for ms in cells)])
    rows.append(["experts moved per layer, at most", *(f"{moved[name]:.1f}" for name in names)])
    verdicts = []
    for home, what in (("anneal", "moves priced"), ("lpt", "moves free")):
        joint = variants["expert aware", home, "chain"]
        others = {
            key: ms
            for key, ms in variants.items()
            if key[1] in ("keep", home) and (key[1:] != (home, "chain") or key[0] in ("as given", "balanced tokens"))
        }
        best = min(others, key=lambda key: others[key])
        ratio = joint / others[best]
        says = "beats every subset" if ratio < 1.0 else "equals the best subset" if ratio == 1.0 else "is worse than a subset"
        verdicts.append(f"Pack + {home} ({what}) + rank {says}: {ratio:.4f} of {', '.join(best)}.")
    return markdown(("pack", *(f"{home}, {rank}" for home, rank in names)), rows) + "\n\n" + "\n".join(verdicts)


def homes(case: Case, work: Workload, redundant: int, name: str) -> Array:
    """Home slots that a home level decides for a workload."""
    return HOMES[name].solve(Problem.of(work, case.cluster(), redundant=redundant))


def moves(home_LE: Array, work: Workload) -> float:
    """Experts per layer that change their rank."""
    base = work.E // work.G
    return float((home_LE // base != np.arange(work.E) // base).sum(axis=1).mean())


def speed_table() -> str:
    """Seconds of whole steps of 48 layers, 128 experts."""
    rows = []
    for num_sequences, mean_length in ((1024, 400.0), (8192, 100.0)):
        trace = synthetic_trace("qwen3-30b-a3b", num_sequences=num_sequences, mean_length=mean_length, seed=0)
        for num_ranks, tokens_per_rank in ((16, 2048), (64, 1024)):
            case = Case(about="", num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, make=lambda: trace)  # noqa: B023
            cells = [f"{packed(case, trace, packer)[1]:.2f}" for packer in (BalancedTokens(), ExpertAware())]
            wall_s: dict[int, list[float]] = {num_threads: [] for num_threads in (1, 2)}
            for num_threads in (1, 2) * 3:
                began = time.perf_counter()
                Planner(pack=ExpertAware()).workload(
                    trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, num_threads=num_threads
                )
                wall_s[num_threads].append(time.perf_counter() - began)
            cells += [f"{min(seconds):.2f}" for seconds in wall_s.values()]
            rows.append([str(num_sequences), str(trace.T), str(num_ranks), *cells])
    head = ("BalancedTokens s", "ExpertAware s", "ExpertAware wall s, one thread", "two threads")
    return markdown(("sequences", "tokens", "ranks", *head), rows)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    args = parser.parse_args()
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; choose from {', '.join(CASES)}")
    sections = [
        f"# Packing\n\nMeasured on: {hardware()}. Command: `python -m bench.packing`. Stage times: model, uncalibrated, update,"
        " nodes of 8 ranks (8xh100) unless the case says otherwise. Late attention: attention of the late rank over the mean."
        " Static skew and R = 0: homes as they are, no replicas; R = 1: `Planner()` under `time`. Dispatch share: of the stage at"
        " R = 1. Homes are contiguous unless the row says otherwise; the time to move homes is in no figure."
    ]
    for name in args.cases or CASES:
        case = CASES[name]
        absent = [file for file in case.files if not (RECORDED / file).exists()]
        if absent:
            sections.append(f"## {name}\n\nSkipped: recorded traces {', '.join(absent)} are not here.")
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        trace = case.make()
        what = f"{trace.Q} sequences, {trace.T} tokens, {case.num_ranks} ranks x {case.tokens_per_rank} tokens"
        sections.append(
            f"## {name}\n\n{case.about}: {what}.\n\n{packers_table(case, trace)}\n\nLevels together, stage time over that of file"
            f" order, kept homes, no replicas:\n\n{joint_table(case, trace)}"
        )
        print(sections[-1], file=sys.stderr, flush=True)
    if not args.cases:
        about = "CPU seconds but for the last two columns, best of three; 48 layers, 128 experts."
        sections.append(f"## Planning time\n\n{about}\n\n{speed_table()}")
    text = "\n\n".join(sections) + "\n"
    emit(text, args.out)


if __name__ == "__main__":
    main()
