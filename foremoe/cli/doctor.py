"""``foremoe doctor``: shows the versions and hardware that matter to foremoe, for use in a bug report."""

import itertools
import os
import platform
import shutil
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from foremoe.base.errors import first_line
from foremoe.base.extensions import entry_point_names
from foremoe.base.hardware import hardware
from foremoe.base.version import __version__
from foremoe.cli.job_options import judge_job
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.options import option, table_options
from foremoe.cli.tables import Column, Look, Table
from foremoe.planner.parsing import GROUP
from foremoe.solvers.search.descend import search_rows

COLUMNS = {
    "part": Column("part", left=True, rank=0), "found": Column("found", left=True, rank=1),
    "use": Column("used for", left=True, rank=2),
}  # fmt: skip
# Names of a distribution and the purpose for which foremoe uses it. The first name that is installed is shown.
_PACKAGES = {
    ("numpy",): "plans", ("numba",): "planner and simulator", ("safetensors",): "plan and trace files",
    ("pyscipopt",): "the solver exact", ("torch",): "runtime and adapters", ("triton",): "fused kernels on GPUs",
    ("cupy-cuda13x", "cupy-cuda12x", "cupy"): "the backend cupy_peer", ("megatron-core",): "the Megatron adapter",
    ("transformer-engine",): "grouped experts in Megatron", ("deep-ep", "deep_ep"): "flex dispatchers and DeepEpEngine",
    ("verl",): "the veRL adapter", ("transformers",): "recording routing", ("pyarrow",): "parquet files",
    ("vllm",): "rollout", ("sglang",): "rollout",
}  # fmt: skip
_VARIABLES = (
    "FOREMOE", "NUMBA_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "VERL_USE_EXTERNAL_PLUGINS",
    "VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR",
)  # fmt: skip

_HELP = """Shows what foremoe finds on this machine: versions, GPUs, plug-ins and folders.

The command changes and measures nothing. Put its output into a bug report. With --job, it also names the first option of a job
that foremoe refuses. The exit code is then 1. Experts themselves are checked only when attaching.

\b
Example:
  foremoe doctor --job resolved.yaml
"""


@click.command(cls=JsonCommand, help=_HELP)
@option(
    "--job", metavar="FILE",
    help="Resolved settings of veRL or NeMo-RL, or Megatron's options (YAML, JSON or TOML), or Megatron's flags as text."
    "  [default: no job is checked]",
)  # fmt: skip
@table_options
def doctor(job: str | None, json_file: str | None, look: Look = Look()) -> None:  # noqa: B008
    """Runs ``foremoe doctor``."""
    require_writable({"the JSON file": json_file}, [job])
    look.require(COLUMNS)
    judged = None if job is None else judge_job(job)
    rows = [{"part": part, "found": found, "use": use} for part, found, use in _parts()]
    told = []
    if judged is not None:
        told = [
            f"{judged.place} ({judged.sizes}): {judged.refused or 'no option is refused; experts are checked when attaching'}",
            "",
        ]
    payload = {"parts": rows, "job": None if judged is None else judged._asdict()}
    emit(json_file, payload, [*told, Table(COLUMNS, rows, rows)], look)
    if judged is not None and judged.refused:
        click.get_current_context().exit(1)


def _parts() -> list[tuple[str, str, str]]:
    machine: dict[str, Any] = hardware()
    parts = [
        ("foremoe", __version__, str(Path(__file__).parents[1])),
        ("python", platform.python_version(), machine["system"]),
        ("processor", machine["processor"], f"{machine['cores']} cores for this process"),
    ]
    parts += [(*_version(names), use) for names, use in _PACKAGES.items()]
    parts += _gpus()
    parts += [
        ("shared memory", _free("/dev/shm"), "ranks of one machine"),
        ("numba's cache", *_cache()),
        ("planner's kernels", *_kernels()),
        ("solvers of others", ", ".join(entry_point_names(GROUP)) or "none", f"entry points {GROUP}"),
        ("backends of others", ", ".join(entry_point_names("foremoe.backends")) or "none", "entry points foremoe.backends"),
    ]
    if find_spec("verl") is not None:
        there = "foremoe" in entry_point_names("verl.plugins")
        parts.append(("veRL plug-in", "registered" if there else "not registered: install foremoe", "`import verl` loads it"))
    if find_spec("megatron") is not None and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        parts.append(("CUDA_DEVICE_MAX_CONNECTIONS", "not set", "environment variable"))
    return parts + [(name, os.environ[name], "environment variable") for name in _VARIABLES if name in os.environ]


def _version(names: tuple[str, ...]) -> tuple[str, str]:
    """Returns the first installed name and its version. If no name is installed, returns the first name."""
    for name in names:
        try:
            return name, metadata.version(name) or "broken: no metadata"  # None if an uninstall left a folder behind
        except metadata.PackageNotFoundError:
            continue
    return names[0], "not installed"


def _gpus() -> list[tuple[str, str, str]]:
    """Lists the GPUs that torch finds, with their compute capability, memory and CUDA version, and access between them."""
    if find_spec("torch") is None:
        return [("GPUs", "not known", "found by torch, which is not installed")]
    try:
        import torch

        if not torch.cuda.is_available():
            return [("GPUs", "none", "CPU runs only")]
        found = []
        for i in range(torch.cuda.device_count()):
            sizes = torch.cuda.get_device_properties(i)
            what = f"compute capability {sizes.major}.{sizes.minor}, {sizes.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}"
            found.append((f"GPU {i}", sizes.name, what))
        pairs = itertools.permutations(range(len(found)), 2)
        apart = next((f"not from GPU {i} to {j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)), "")
        if len(found) > 1:
            found.append(("peer access", apart or "between all GPUs", "CUDA IPC in cupy_peer; containers also need --ipc=host"))
        return found
    except Exception as error:  # bug reports are often about a broken driver or build
        return [("GPUs", "torch failed", first_line(error))]


def _free(folder: str) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free in {folder}"
    except OSError:
        return f"no {folder}"


def _cache() -> tuple[str, str]:
    """Returns the folder in which compiled kernels are cached, and a text that says whether the folder is writable."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parents[1])
    kept = os.access(folder, os.W_OK)
    return str(folder), "compiled kernels stay" if kept else "not writable: numba uses a folder of the user instead"


def _kernels() -> tuple[str, str]:
    """Says whether the default planner has been compiled. A change of foremoe or numba since then is not noticed."""
    file = getattr(getattr(search_rows, "_cache", None), "_cache_file", None)
    if file is None:
        return "not cached", "every process compiles them, or numba's compiler is off"
    if os.path.exists(file._index_path):
        return "compiled", "they are compiled again if foremoe or numba has changed since"
    return "not compiled", "the first plan compiles for one to three minutes; `foremoe warm-up` does it in advance"
