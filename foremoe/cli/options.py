"""Options that several commands share."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from foremoe.base.errors import InputError
from foremoe.cli.case_file import read_case
from foremoe.cli.jsonio import STDOUT
from foremoe.cli.kinds import AUTO, MAX_EXPERTS, Dispatch, Rollout, SlotCount
from foremoe.cli.tables import Look
from foremoe.machine.trainer import Trainer

DEFAULT_RANKS = 16
DEFAULT_TOKENS_PER_RANK = 1024
DEFAULT_MICRO_STEPS = 4
MODELS = (
    "qwen3-30b-a3b, qwen3-235b-a22b, glm-4.5-air, deepseek-v3, gpt-oss-20b, "
    "gpt-oss-120b, deepseek-v2-lite, mixtral-8x7b, kimi-k2, glm-4.5, qwen3-next-80b-a3b"
)
CLUSTERS = "8xh100, 8xh800, 8xh200, 8xh20, 8xa100, 8xpcie, 8xb200, gb200-nvl72, 8xb300, gb300-nvl72"
REGIMES = ("mild", "mid", "skew", "gpt-oss-like", "esft-like", "r1-like", "gpt-oss-math-like", "qwen3-like")
# The names are written out, like `REGIMES`, so that building the options does not import numpy.
IMBALANCES = (
    "balanced", "hot-expert-set", "hot-rank", "spread-hot-experts", "ragged-sources", "idle-rank", "rotating-hot-spot", "burst",
)  # fmt: skip
DEFAULT_REGIME = "qwen3-like"

COUNT, RANKS = click.IntRange(1, 2**31 - 1), click.IntRange(1, MAX_EXPERTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Options about the training around the stage. An option that is not given is None."""

    optimizer_bytes: float = 12.0
    data_parallel: int | None = None
    rollout_share: Mapping[str, Any] | None = None  # as `Rollout` reads it

    def of(self, num_groups: int = 1) -> Trainer:
        """Returns the trainer. `num_groups` is the number of EP groups to assume if no option gives one."""
        data_parallel = self.data_parallel or num_groups
        return Trainer(optimizer_bytes=self.optimizer_bytes, data_parallel=data_parallel, **(self.rollout_share or {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOptions:
    """Options that describe the case to plan. An option that is not given is None."""

    traces: tuple[str, ...]
    synthetic: str | None
    regime: str | None
    micro_steps: int | None
    layers: str | None
    ranks: int | None
    ranks_per_node: int | None = None
    tokens_per_rank: int | None
    shuffle: bool
    seed: int = 0
    history: str | None
    model: str | None
    cluster: str
    accept_fit: bool = False
    dispatch: str | None
    host_store: bool
    stage: str | None
    redundant: int | None = None  # None means that foremoe chooses the number
    objective: str
    schedule: str | None
    slot_depth: int
    replicas: str
    trainer: TrainerOptions = TrainerOptions()
    case: str | None = None
    pp: int = 1  # pipeline ranks, which `on_gpus` sets

    @property
    def files(self) -> list[str | None]:
        """Returns the paths and preset names from which the case is read."""
        return [*self.traces, self.history, self.synthetic, self.model, self.cluster, self.case]


def option(*names: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Does the same as `click.option`, but shows the default, and shows N in place of an integer."""
    if isinstance(settings.get("type"), click.IntRange):
        settings.setdefault("metavar", "N")
    return click.option(*names, **({"show_default": True} | settings))


accept_fit_option = option(
    "--accept-fit", is_flag=True, help="Accept a --cluster file even if its fit has a residual above 100 %."
)
_TOML = "NAME|FILE.toml"
_MODEL = "NAME|config.json|FILE.toml"
_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_CASE: dict[str, _Decorator] = {
    "case": option(
        "--case", metavar="FILE.toml", is_eager=True, callback=lambda ctx, _, path: read_case(ctx, path, [*_CASE, *_TRAINER]),
        help="File with options of the case, with keys named as the options, such as tokens-per-rank = 4096. The command line"
        " overrides it. Paths in it start at the current folder, and a list `traces` names TRACEs.  [default: no file]",
    ),
    "traces": click.argument("traces", metavar="[TRACE]...", nargs=-1),
    "synthetic": option(
        "--synthetic", metavar=_MODEL,
        help=f"Generate synthetic routing of a model instead of reading a TRACE. Models: {MODELS}.  [default: read a TRACE]",
    ),
    "regime": option(
        "--regime", type=click.Choice([*REGIMES, *IMBALANCES]), metavar="NAME",
        help=f"How uneven --synthetic routing is and how fast it changes. Regimes: {', '.join(REGIMES)}. W0 to W7 of"
        f" Megatron-LM's imbalance benchmark: {', '.join(IMBALANCES)}.  [default: {DEFAULT_REGIME}]",
    ),
    "ranks": option(
        "--ranks", type=RANKS,
        help=f"Number of ranks in the expert-parallel group.  [default: {DEFAULT_RANKS}, or the number in a file]",
    ),
    "ranks_per_node": option(
        "--ranks-per-node", type=RANKS, help="Number of ranks per node.  [default: as in the cluster]"
    ),
    "tokens_per_rank": option(
        "--tokens-per-rank", type=COUNT,
        help="Token budget of one source rank in a micro-step. It sets the number of micro-steps. Sequences are not cut."
        f"  [default: {DEFAULT_TOKENS_PER_RANK}]",
    ),
    "micro_steps": option(
        "--micro-steps", metavar="N", type=COUNT,
        help="With a TRACE, use only the first N micro-steps.  [default: all]  With --synthetic, generate N micro-steps."
        f"  [default: {DEFAULT_MICRO_STEPS}]",
    ),
    "layers": option(
        "--layers", metavar="A:B",
        help="Use only MoE layers A to B-1, counted from 0, such as those of one pipeline rank.  [default: all]",
    ),
    "shuffle": option("--shuffle", is_flag=True, help="Shuffle the sequences before packing them, with the seed in --seed."),
    "seed": option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Seed of the random number generator."),
    "history": option(
        "--history", metavar="TRACE",
        help="Trace of an earlier step. With foresight 'previous', the first micro-step is planned for the load of this trace."
        "  [default: no earlier load]",
    ),
    "model": option(
        "--model", metavar=_MODEL,
        help=f"Model that was recorded: {MODELS}.  [default: the one named in the TRACE, or the only preset of its shape]",
    ),
    "cluster": option("--cluster", metavar=_TOML, default="8xh100", help=f"Cluster file, or a type of node: {CLUSTERS}."),
    "accept_fit": accept_fit_option,
    "dispatch": option(
        "--dispatch", type=Dispatch(),
        help="How tokens are sent. With pairs, every (token, expert) pair is sent, as in a plain all-to-all. With node, a token"
        " is sent once to every node that serves it, as in DeepEP and HybridEP.  [default: pairs, or the kind in a file]",
    ),
    "host_store": option(
        "--host-store", is_flag=True,
        help="Allow copies from a host store, which keeps all experts in every node's memory. A cluster file sets this itself.",
    ),
    "stage": option(
        "--stage", type=click.Choice(["update", "recompute"]),
        help="Stage to plan. update has a forward and a backward pass. recompute has only a forward pass."
        "  [default: update, or the stage in a file]",
    ),
    "redundant": option(
        "--redundant", metavar="R", type=SlotCount(), default=AUTO,
        help="Number of redundant slots per rank, for copies of other ranks' experts. With auto, foremoe chooses the number.",
    ),
    "objective": option(
        "--objective", type=click.Choice(["time", "balance"]), default="time",
        help="What plans minimise: the predicted time, or only the load of the busiest rank.",
    ),
    "schedule": option(
        "--schedule", metavar="TEXT",
        help="Order of passes on a rank: forward, accumulate, 1f1b:PP,RANK or interleaved:PP,VPP,RANK. Append +reforward if "
        "the backward pass runs the forward pass again.  [default: accumulate; forward for recompute]",
    ),
    "slot_depth": option(
        "--slot-depth", metavar="N", type=click.IntRange(1, 1024), default=3,
        help="Number of buffers per redundant slot. All layers share one ring of buffers.",
    ),
    "replicas": option(
        "--replicas", type=click.Choice(["any", "node"]), default="any",
        help="Where replicas may be placed: on any rank, or only in the node of the expert's home.",
    ),
}  # fmt: skip


def case_options(*, without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds all options of a case except those in `without`. The command gets them as one `CaseOptions` in ``case_options``."""
    names = [name for name in _CASE if name not in without]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def wrapped(**given: Any) -> None:
            # Before click 8.2, an argument without words has no default.
            given["traces"] = given["traces"] or tuple((click.get_current_context().default_map or {}).get("traces", ()))
            function(case_options=CaseOptions(**{name: given.pop(name) for name in names}), **given)

        decorated: Any = wrapped
        for name in reversed(names):
            decorated = _CASE[name](decorated)
        return decorated

    return decorate


_TRAINER: dict[str, _Decorator] = {
    "optimizer_bytes": option(
        "--optimizer-bytes", metavar="BYTES", type=click.FloatRange(0, 1024), default=12.0,
        help="Bytes of optimizer state per parameter: 12 for Adam (fp32 weight and two moments), or 0 if the state is offloaded.",
    ),
    "data_parallel": option(
        "--data-parallel", metavar="N", type=click.IntRange(1, 2**20),
        help="Number of EP groups that train together. The groups share the optimizer state and reduce gradients."
        "  [default: the number of planned groups]",
    ),
    "rollout_share": option(
        "--rollout-share", metavar="SHARE|SECONDSs", type=Rollout(),
        help="Part of a training step outside the stages, measured with static placement, as 0.4, 40% or 30s (seconds)."
        "  [default: unknown; the gain per step is shown for 50, 85 and 95 %]",
    ),
}  # fmt: skip


def trainer_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds options about the training around the stage, as ``case_options.trainer``. Use this decorator below `case_options`."""

    @functools.wraps(function)
    def wrapped(case_options: CaseOptions, **given: Any) -> None:
        told = TrainerOptions(**{name: given.pop(name) for name in _TRAINER})
        function(case_options=dataclasses.replace(case_options, trainer=told), **given)

    decorated: Any = wrapped
    for name in reversed(_TRAINER):
        decorated = _TRAINER[name](decorated)
    return decorated


_LOOK = {
    "wide": option("--wide", is_flag=True, help="Show all columns. Columns that do not fit are printed below the table."),
    "columns": option(
        "--columns", metavar="NAME,...", multiple=True,
        help="Columns to show, by their names in JSON, for example skew_mean,peak_bytes."
        "  [default: the most important ones that fit]",
    ),
    "csv": option(
        "--csv", is_flag=True, help="Print only the rows, as CSV, with times in seconds, sizes in bytes and column names of JSON."
    ),
}  # fmt: skip


def table_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for the look of tables. The command gets them as one `Look` in ``look``."""

    @functools.wraps(function)
    def wrapped(wide: bool, columns: tuple[str, ...], csv: bool, **given: Any) -> None:
        if csv and given.get("json_file") == STDOUT:
            raise InputError("--csv and --json would both write to stdout; give --json a file, as in --json=rows.json.")
        # No column name contains a comma.
        names = tuple(dict.fromkeys(name.strip() for text in columns for name in text.split(",") if name.strip()))
        function(look=Look(wide, names, csv), **given)

    decorated: Any = wrapped
    for name in reversed(_LOOK):
        decorated = _LOOK[name](decorated)
    return decorated


planners_option = functools.partial(option, "--planners", metavar="LIST", multiple=True)
threads_option = option("--threads", type=click.IntRange(1, 4096), help="Number of planning threads.  [default: every core]")
