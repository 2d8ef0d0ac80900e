"""Drills of the kernel cache: commands run with a cache that is damaged, on a full disk, or that cannot be written.

python -m bench.cache_drills [--out bench/results/cache-drills_HARDWARE_DATE.md]
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numba.core.caching import _CacheLocator

import foremoe
from bench.output import command_line, emit, hardware

PACKAGE = Path(foremoe.__file__).parent
# Larger code takes long to compile again, and is loaded and saved in the same way.
_LARGEST_BYTES = 60_000
_OBEY = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]  # else root may write anywhere

COMMANDS = {
    "plan": ["plan", "trace.npz", "--model", "model.toml", "--ranks", "4", "-o", "again.safetensors"],
    "inspect": ["inspect", "trace.npz", "--ranks", "4"],
    "check": ["check", "plan.safetensors", "--trace", "trace.npz"],
    "compare": ["compare", "trace.npz", "--model", "model.toml", "--ranks", "4", "--planners", "foremoe,greedy"],
    "warm-up": ["warm-up"],
}


def zero_middle(data: bytes) -> bytes:
    """A block in the middle never reached the disk."""
    return data[: len(data) // 2] + bytes(min(512, len(data) // 2)) + data[len(data) // 2 + 512 :]


DAMAGES: tuple[Callable[[bytes], bytes], ...] = (
    lambda data: b"", lambda data: data[:1], lambda data: data[: len(data) // 2], lambda data: data[:-1],
    lambda data: bytes(len(data)), zero_middle, lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
)  # fmt: skip


def copy_cache(folder: Path) -> None:
    """Copies this installation's compiled kernels to where numba looks for them if NUMBA_CACHE_DIR is `folder`."""
    for file in PACKAGE.rglob("__pycache__/*.nb[ci]"):
        place = folder / _CacheLocator.get_suitable_cache_subpath(str(file.parent.parent / "any.py"))
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)


def damage(folder: Path) -> int:
    """Damages every third small index or data file, one way after the other; how many."""
    small = [path for path in sorted(folder.rglob("*.nb[ci]")) if path.stat().st_size < _LARGEST_BYTES][::3]
    for i, path in enumerate(small):
        path.write_bytes(DAMAGES[i % len(DAMAGES)](path.read_bytes()))
    return len(small)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A file system in memory that has room for the cache, and then for nothing."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> None:
    """Takes all the room that is left."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))


def run(work: Path, cache: Path, words: list[str], prefix: list[str] | None = None) -> tuple[float, int, str, str]:
    """Seconds, exit code, what a command says but for times, and its lines on stderr."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "COLUMNS": "200"}
    begin_s = time.perf_counter()
    command = [*(prefix or []), sys.executable, "-m", "foremoe", *words]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    said = re.sub(r"compiled \d+ functions|[\d.,]+ m?s\b|\d+ %", "-", done.stdout)
    told = [line for line in done.stderr.splitlines() if "NUMBA_CACHE_DIR" in line or "Traceback" in line or "error" in line]
    return time.perf_counter() - begin_s, done.returncode, said, " ".join(told)


def line(work: Path, name: str, case: str) -> str:
    """One drill."""
    words = COMMANDS[name]
    with contextlib.ExitStack() as stack:
        cache = work / f"{name} {case}"
        if case == "full disk":
            stack.enter_context(full_disk(cache))
        copy_cache(cache)
        _, code, said, _ = run(work, cache, words)
        damaged = damage(cache)
        if case == "full disk":
            fill(cache)
        if case == "read-only":
            for place in (cache, *cache.rglob("*")):
                place.chmod(place.stat().st_mode & ~0o222)
        seconds, found, again, told = run(work, cache, words, _OBEY if case == "read-only" and os.getuid() == 0 else None)
        if case == "read-only":
            for place in (cache, *cache.rglob("*")):
                place.chmod(place.stat().st_mode | 0o700)
        same = "yes" if (code, said) == (found, again) else f"**no: exit code {found}**"
        next_s, *_ = run(work, cache, words)
    return f"| {name} | {case}, {damaged} files damaged | {same} | {seconds:.1f} | {next_s:.1f} | {told or 'nothing'} |"


def inputs(work: Path) -> None:
    """A trace, its model and a plan."""
    model = foremoe.Model.preset("gpt-oss-20b")
    trace = foremoe.synthetic_trace("gpt-oss-20b", num_sequences=8, mean_length=40.0, num_layers=2, seed=1)
    foremoe.RoutingTrace(topk_TLK=np.array(trace.topk_TLK), num_experts=trace.num_experts, seq_len_Q=trace.seq_len_Q).save(
        work / "trace.npz"
    )
    model.to_toml(work / "model.toml")
    words = ["plan", "trace.npz", "--model", "model.toml", "--ranks", "4", "-o", "plan.safetensors"]
    subprocess.run([sys.executable, "-m", "foremoe", *words], cwd=work, check=True, capture_output=True)


def table(names: Iterable[str] = COMMANDS) -> list[str]:
    """The drills of these commands, in markdown."""
    lines = [
        "| command | cache | as with a whole cache | s | next, s | what stderr says |",
        "| --- | --- | --- | ---: | ---: | --- |",
    ]
    with tempfile.TemporaryDirectory(prefix="foremoe-drills-") as folder:
        inputs(Path(folder))
        for name in names:
            for case in ("damaged", "full disk", "read-only"):
                lines.append(line(Path(folder), name, case).replace(folder, "..."))
                print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--command", choices=list(COMMANDS), help="drill it alone")
    args = parser.parse_args()
    about = (
        f"Measured on: {hardware()}. Command: `python -m bench.cache_drills`. Seconds of the command with the damaged cache, and"
        " of the next one."
    )
    lines = table(COMMANDS if args.command is None else [args.command])
    emit("\n".join(["# Kernel cache drills", "", about, "", *lines]) + "\n", args.out)


if __name__ == "__main__":
    main()
