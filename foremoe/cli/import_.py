"""``foremoe import``: converts files of engines and recorders to a trace or to counts."""

import click

from foremoe.base.errors import InputError
from foremoe.cli.figures import trace_figures, trace_text, workload_figures, workload_text
from foremoe.cli.files import file_name, model_of, read_routing
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.options import COUNT, DEFAULT_RANKS, DEFAULT_TOKENS_PER_RANK, RANKS, option
from foremoe.workload.workload import Workload

_HELP = """Converts FILEs of one recording into a trace (.npz or .safetensors) or counts (.safetensors).

Reads answers of vLLM and SGLang as JSON lines, and the experts chosen for tokens as JSON lines, parquet, .pt or .npz. Also reads
counts from SGLang's recorder, from TensorRT-LLM's statistics and from tables. All other commands read these files, too. A token's
routing is unknown if a file lacks its experts or lists an expert twice. If counts have no source ranks, they are spread evenly
over --ranks.

\b
Examples:
  foremoe import answers.jsonl --model qwen3-30b-a3b -o rollout.npz
  foremoe import recorded.pt --model deepseek-v3 -o counts.safetensors
"""


@click.command("import", cls=JsonCommand, help=_HELP)
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@option("-o", "--output", metavar="FILE", required=True, help="Path of the trace or the counts to write.")
@option(
    "--model", metavar="NAME|config.json|FILE.toml", help="Model that was recorded.  [default: the model that the files name]"
)
@option("--ranks", type=RANKS, default=DEFAULT_RANKS, help="For counts: number of source ranks over which to spread the counts.")
@option(
    "--tokens-per-rank", type=COUNT, default=DEFAULT_TOKENS_PER_RANK,
    help="For counts: join recorded steps until they have N tokens per rank.",
)  # fmt: skip
@option(
    "--stage", type=click.Choice(["update", "recompute"]), default="update", help="For counts: stage to which the counts belong."
)
def import_(
    files: tuple[str, ...], output: str, model: str | None, ranks: int, tokens_per_rank: int, stage: str, json_file: str | None
) -> None:
    """Runs ``foremoe import``."""
    require_writable({"the output": output, "the JSON file": json_file}, [*files, model])
    told = None if model is None else model_of(model)
    found = read_routing(files, told, ranks, tokens_per_rank, stage, strict=False)
    if isinstance(found, Workload):
        if not output.lower().endswith(".safetensors"):
            raise InputError(f"the files hold counts, which are written as .safetensors; give such a name instead of {output!r}.")
        kind, figures = "workload", workload_figures(found)
        lines = workload_text(figures)
    else:
        kind, figures = "trace", trace_figures(found)
        lines = trace_text(figures)
    found.save(output)
    payload = {"file": file_name(output), "kind": kind, **figures}
    emit(json_file, payload, [f"{file_name(output)}: {lines[0]}", *lines[1:]])
