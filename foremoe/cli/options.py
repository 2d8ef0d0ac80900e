"""Options that several commands share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from foremoe.cli.texts import Whole

DEFAULT_RANKS = 16
DEFAULT_TOKENS_PER_RANK = 1024
DEFAULT_MICRO_STEPS = 4
MODELS = "qwen3-30b-a3b, qwen3-235b-a22b, glm-4.5-air, deepseek-v3, gpt-oss-20b, gpt-oss-120b, deepseek-v2-lite, mixtral-8x7b"
CLUSTERS = "8xh100, 8xh200, 8xh20, 8xa100, 8xpcie"
REGIMES = ("mild", "mid", "skew", "gpt-oss-like", "esft-like")
DEFAULT_REGIME = "mid"


COUNT, RANKS = Whole(), Whole(high=2**15 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOptions:
    """What the command line said about the case; None where it said nothing."""

    traces: tuple[str, ...]
    synthetic: str | None
    regime: str | None
    micro_steps: int | None
    layers: str | None
    ranks: int | None
    ranks_per_node: int | None
    tokens_per_rank: int | None
    shuffle: bool
    seed: int
    history: str | None
    model: str | None
    cluster: str
    stage: str | None
    redundant: int = 1
    objective: str
    schedule: str | None
    slots: str
    replicas: str

    @property
    def files(self) -> tuple[str, ...]:
        """Files that the case reads."""
        toml = (text for text in (self.synthetic, self.model, self.cluster) if text is not None)
        return (*self.traces, *(() if self.history is None else (self.history,)), *toml)


_SOURCE = (
    click.argument("traces", metavar="[TRACE]...", nargs=-1),
    click.option(
        "--synthetic",
        metavar="NAME|FILE.toml",
        help=f"Make seeded artificial routing of a model instead of reading a TRACE: {MODELS}.  [default: none]",
    ),
    click.option(
        "--regime",
        type=click.Choice(REGIMES),
        help=f"How uneven --synthetic routing is, and how fast it moves.  [default: {DEFAULT_REGIME}]",
    ),
    click.option(
        "--ranks", type=RANKS, help=f"Ranks of the expert-parallel group.  [default: {DEFAULT_RANKS}, or what a file says]"
    ),
    click.option(
        "--ranks-per-node", type=RANKS, help="Ranks of one node, joined by the fast link.  [default: the cluster's own, 8]"
    ),
    click.option(
        "--tokens-per-rank",
        type=COUNT,
        help="Token budget of one source rank in a micro-step; sequences stay whole, and how many micro-steps there are "
        f"follows.  [default: {DEFAULT_TOKENS_PER_RANK}]",
    ),
    click.option(
        "--micro-steps",
        type=COUNT,
        help="With a TRACE: take the first so many micro-steps only.  [default: all]  "
        f"With --synthetic: make so many.  [default: {DEFAULT_MICRO_STEPS}]",
    ),
    click.option(
        "--layers", metavar="A:B", help="Only MoE layers A to B-1 (from 0), such as those of one pipeline stage.  [default: all]"
    ),
    click.option("--shuffle", is_flag=True, help="Deal the sequences in a random order drawn with --seed, not in file order."),
    click.option("--seed", type=Whole(0, 2**63 - 1), default=0, show_default=True, help="Seed of all random draws."),
    click.option(
        "--history",
        metavar="TRACE",
        help="Trace of an earlier step: the load that foresight 'previous' begins with.  [default: none]",
    ),
)
_MACHINE = (
    click.option(
        "--model",
        metavar="NAME|FILE.toml",
        help=f"The model that was recorded: {MODELS}.  [default: what the TRACE says, or the only one of its shape]",
    ),
    click.option("--cluster", metavar="NAME|FILE.toml", default="8xh100", show_default=True, help=f"Kind of node: {CLUSTERS}."),
    click.option(
        "--stage",
        type=click.Choice(["update", "recompute"]),
        help="update runs forward and backward, recompute forward only.  [default: update, or what a file says]",
    ),
)
_REDUNDANT = click.option(
    "--redundant",
    metavar="R",
    type=Whole(0, 2**15 - 1),
    default=1,
    show_default=True,
    help="Redundant slots per rank: experts that a rank can hold beside its own.",
)
_PROBLEM = (
    click.option(
        "--objective",
        type=click.Choice(["time", "balance"]),
        default="time",
        show_default=True,
        help="Minimise predicted seconds, or the largest rank load only.",
    ),
    click.option(
        "--schedule",
        metavar="TEXT",
        help="Order of passes on a rank: forward, accumulate, 1f1b:PP,RANK or interleaved:PP,VPP,RANK; +reforward behind it if "
        "backward runs the forward again.  [default: accumulate; forward for recompute]",
    ),
    click.option(
        "--slots",
        metavar="TEXT",
        default="shared:3",
        show_default=True,
        help="Buffers of redundant slots: shared:DEPTH (one ring for all layers) or resident:COPIES (per layer).",
    ),
    click.option(
        "--replicas",
        type=click.Choice(["any", "node"]),
        default="any",
        show_default=True,
        help="Where replicas may live: on any rank, or only in their home's node.",
    ),
)


def case_options(*, redundant: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds every option of a case and hands them over as one `CaseOptions` in parameter ``case_options``.

    Args:
        redundant: False for a command that has a ``--redundant`` of its own.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        names = [f.name for f in dataclasses.fields(CaseOptions) if redundant or f.name != "redundant"]

        @functools.wraps(function)
        def wrapped(**given: Any) -> None:
            options = CaseOptions(**{name: given.pop(name) for name in names})
            function(case_options=options, **given)

        decorated: Any = wrapped
        for option in reversed((*_SOURCE, *_MACHINE, *((_REDUNDANT,) if redundant else ()), *_PROBLEM)):
            decorated = option(decorated)
        return decorated

    return decorate
