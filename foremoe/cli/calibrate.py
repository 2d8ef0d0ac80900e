"""``foremoe calibrate``: measures the cost model's constants on this machine and writes them to a cluster file."""

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from foremoe.base.errors import InputError, TransferError, printable
from foremoe.base.files import write_file
from foremoe.calibrate import Case, Fit, Measured, fit
from foremoe.calibrate.gate import MOST_TAKEN
from foremoe.cli.files import cluster_of, is_file, model_of
from foremoe.cli.jsonio import JsonCommand, emit, plain, require_writable
from foremoe.cli.kinds import MAX_EXPERTS
from foremoe.cli.options import CLUSTERS, COUNT, MODELS, accept_fit_option, option, table_options
from foremoe.cli.progress import Progress
from foremoe.cli.tables import Column, Look, Table, number, percent, plural
from foremoe.cli.texts import Seconds, is_count
from foremoe.machine.model import Model

FAILED = 1
_HEAD_COLUMNS = 64  # columns per attention head of a model for which only sizes are given
_SEQUENCE = 512  # largest number of tokens per sequence
_SHARES = {"worst": Column("worst", percent, rank=3), "spread": Column("spread", percent, rank=6)}
CONSTANTS = {
    "name": Column("constant", left=True, rank=0), "value": Column("value", "{:.4g}".format, rank=1),
    "unit": Column("unit", left=True, rank=2), "num_points": Column("points", rank=5),
    "median": Column("median residual", percent, rank=4), **_SHARES,
}  # fmt: skip
BACKENDS = {
    "backend": Column("backend", left=True, rank=0), "link": Column("link", left=True, rank=0),
    "bytes_per_s": Column("GB/s", lambda value: f"{value / 1e9:.4g}", rank=1),
    "latency_s": Column("us per copy", lambda value: f"{value * 1e6:.4g}", rank=2),
    "contention": Column("contention", number(2), rank=4), **_SHARES,
}  # fmt: skip


_HELP = """Measures experts, layers, links and copies on this machine and fits the cost model's constants.

The command writes a cluster file. Pass it to other commands as --cluster FILE.toml. The constants depend on the sizes of the
model. Run nothing else on the machine meanwhile. To also measure links between nodes, start the command on all ranks with
torchrun. A fit counts as not calibrated if a residual is above 25 %, a constant is at its limit, or repeats spread by more than
10 %.

\b
Examples:
  foremoe calibrate --hidden 1024 --ffn 512 --experts 32 --topk 4 -o here.toml
  torchrun --nnodes 2 --nproc-per-node 8 ... \\
    -m foremoe calibrate --model qwen3-30b-a3b -o cluster.toml
"""


@click.command(cls=JsonCommand, help=_HELP)
@option(
    "--ranks", type=click.IntRange(1, 1024),
    help="Number of processes to start on this machine. If it has GPUs, each gets one.  [default: 2, or 1 with one GPU]",
)  # fmt: skip
@option(
    "--model", metavar="NAME|config.json|FILE.toml",
    help=f"Model whose sizes to measure: {MODELS}.  [default: sizes given by --hidden, --ffn, --experts and --topk]",
)  # fmt: skip
@option("--hidden", type=COUNT, help="Hidden size of the model. Required without --model.  [default: that of --model]")
@option("--ffn", type=COUNT, help="Intermediate size of one expert. Required without --model.  [default: that of --model]")
@option(
    "--experts", type=click.IntRange(1, MAX_EXPERTS),
    help="Number of experts per layer. Required without --model.  [default: that of --model]",
)  # fmt: skip
@option(
    "--topk", type=click.IntRange(1, MAX_EXPERTS),
    help="Number of experts per token. Required without --model.  [default: that of --model]",
)  # fmt: skip
@option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    help="Data type of weights and tokens.  [default: that of the model, or bfloat16]",
)
@option("--tokens", type=click.IntRange(8, 2**31 - 1), default=2048, help="Number of tokens per rank and micro-step.")
@option("--seconds", type=Seconds(), default=90.0, help="Approximate measuring time in seconds.")
@option(
    "--cluster", metavar="NAME|FILE.toml", default="8xh100",
    help=f"Cluster whose figures are used for links that cannot be measured: {CLUSTERS}.",
)  # fmt: skip
@accept_fit_option
@option(
    "-o", "--output", metavar="FILE.toml", required=True,
    help="Path of the cluster file to write. Residuals are written to FILE.fit.json.",
)  # fmt: skip
@table_options
def calibrate(
    ranks: int | None, tokens: int, seconds: float, cluster: str, output: str, json_file: str | None,
    look: Look = Look(), **sizes: Any,  # noqa: B008
) -> None:  # fmt: skip
    """Runs ``foremoe calibrate``."""
    look.require(CONSTANTS | BACKENDS)
    joined = under_torchrun()
    reports = not joined or int(os.environ["RANK"]) == 0
    if not output.lower().endswith(".toml"):
        raise InputError(f"the cluster file must end in .toml, so that --cluster recognises it as a file; got {output!r}.")
    fit_file = str(Path(output).with_suffix(".fit.json"))
    if reports:  # on other nodes, the folders need not exist
        outputs = {"the cluster file": output, "the residuals' file": fit_file, "the JSON file": json_file}
        require_writable(outputs, [sizes["model"], cluster if is_file(cluster) else None])
    base = cluster_of(cluster, None, None, accept_fit=sizes.pop("accept_fit"))
    chosen = _sizes(**sizes)
    try:
        from foremoe.calibrate.launch import default_ranks, join_started, launch
    except ModuleNotFoundError:
        raise InputError("calibrate needs torch; pip install 'foremoe[torch]'.") from None
    num_ranks = int(os.environ["WORLD_SIZE"]) if joined else (default_ranks() if ranks is None else ranks)
    if joined and ranks not in (None, num_ranks):
        raise InputError(f"torchrun has started {num_ranks} ranks; leave --ranks out.")
    case = Case(model=chosen, num_ranks=num_ranks, tokens=tokens, sequence_length=min(_SEQUENCE, tokens), seconds=seconds)
    try:
        measured = join_started(case, bar) if joined else launch(case, bar)
    except TransferError as error:
        click.echo(f"error: {printable(' '.join(str(error).split()))}", err=True)
        click.get_current_context().exit(FAILED)
    if not reports:
        return
    found = fit(measured, chosen, name=f"fitted: {measured.hardware}", source=source_of(case, measured), base=base)
    found.cluster.to_toml(output)
    record = {
        "case": {
            "model": chosen.to_dict(), "ranks": num_ranks, "experts": case.num_experts, "tokens": tokens,
            "sequence_length": case.sequence_length, "seconds": seconds,
        },
        "hardware": measured.hardware, "versions": measured.versions, "unavailable": measured.unavailable, **found.to_dict(),
    }  # fmt: skip
    points = [point.to_dict() for point in measured.points]
    write_file(fit_file, json.dumps(plain(record | {"points": points}), indent=2) + "\n")
    emit(json_file, record, report(found, measured, base.name, output), look)


def under_torchrun() -> bool:
    """Returns True if this process is one of several ranks that torchrun, or a launcher with the same variables, has started.

    Returns False if only some of the variables are set, as some schedulers leave them.
    """
    rank, size, *others = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    if not os.environ.get("MASTER_ADDR") or not all(map(is_count, (rank, size, *others))):
        return False
    return int(size) > 1 and int(rank) < int(size)


def bar() -> Progress:
    """Returns the progress line of the measurement. Only the rank that reports creates this line."""
    return Progress("measuring")


def source_of(case: Case, measured: Measured) -> str:
    """Returns one line that names the origin of the constants."""
    m, versions = case.model, ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    num_nodes = len(set(measured.node_of_rank))
    return (
        f"foremoe calibrate, {datetime.date.today().isoformat()}, {measured.hardware}; {versions};"
        f" {plural(case.num_ranks, 'rank')} on {plural(num_nodes, 'node')}; hidden {m.hidden_size}, ffn {m.ffn_size},"
        f" top-{m.num_topk} of {case.num_experts} experts, {m.bytes_per_weight:g} bytes per weight, {case.tokens} tokens per rank"
    )


def report(found: Fit, measured: Measured, base: str, output: str) -> list[str | Table]:
    """Returns the table of constants, the table of backends, and the lines below these tables."""
    figures = [line_of(one, CONSTANTS) for one in (*found.constants, *found.checks)]
    backends = [line_of(one, BACKENDS) for one in found.backends]
    head = f"{plural(len(measured.points), 'point')} on {measured.hardware}"
    lines: list[str | Table] = [head, "", Table(CONSTANTS, figures, figures), ""]
    lines += [Table(BACKENDS, backends), ""] if backends else []
    lines += [
        "residual: |fitted - measured| / measured; spread: distance of the quartiles of a point's repeats over their median",
        "constants are fitted to a link's first backend; copies between ranks only check the links' constants",
        *(f"{name} not measured: {why}" for name, why in measured.unavailable.items()),
        *(f"{link}: could not be measured, so the figures of {base} are used" for link in found.kept),
        f"constants: {found.cluster.standing}", *map(str, found.faults),
        f"written: {output}, and residuals and points in {Path(output).with_suffix('.fit.json')}",
    ]  # fmt: skip
    if found.cluster.residual is not None and found.cluster.residual > MOST_TAKEN:
        lines.append(f"its residual is above {MOST_TAKEN:.0%}: commands refuse {output} without --accept-fit")
    return lines


def line_of(figure: Any, columns: Mapping[str, Column]) -> dict[str, Any]:
    """Returns a figure's values by column name. If a figure has no points, their number is None."""
    return {name: getattr(figure, name) if name != "num_points" else figure.num_points or None for name in columns}


def _sizes(
    model: str | None, hidden: int | None, ffn: int | None, experts: int | None, topk: int | None, dtype: str | None
) -> Model:
    """Returns the model that `model` names, or a model with the given sizes."""
    given = {"--hidden": hidden, "--ffn": ffn, "--experts": experts, "--topk": topk}
    if model is not None and any(value is not None for value in given.values()):
        raise InputError("--model already gives the sizes; leave --hidden, --ffn, --experts and --topk out.")
    lacking = [name for name, value in given.items() if value is None]
    if model is None and lacking:
        raise InputError(f"constants depend on sizes: give --model, or {', '.join(given)}; {', '.join(lacking)} are missing.")
    if model is not None:
        table = model_of(model).to_dict()
    else:
        assert hidden is not None
        heads = max(1, hidden // _HEAD_COLUMNS)
        table = {
            "name": "sizes", "num_layers": 1, "first_moe_layer": 0, "num_experts": experts, "num_topk": topk,
            "hidden_size": hidden, "ffn_size": ffn, "attention_params": 4 * hidden * hidden, "num_heads": heads,
            "qk_head_dim": max(1, hidden // heads), "v_head_dim": max(1, hidden // heads), "source": "the command line",
        }  # fmt: skip
    if dtype is not None:
        num_bytes = 4.0 if dtype == "float32" else 2.0
        table |= {"bytes_per_weight": num_bytes, "bytes_per_activation": num_bytes}
    return Model.from_dict(table)
