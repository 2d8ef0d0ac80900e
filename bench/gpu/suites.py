"""Conformance suites, which use the GPU where there is one; without one, the tests of streams on a pretended GPU."""

from __future__ import annotations

import subprocess
import sys

from bench.gpu.measure import DRY

SUITES = {"pinned_host": "tests/transfer/test_pinned_host.py", "cupy_peer": "tests/transfer/test_cupy_peer.py"}
PRETENDED = {"on a pretended GPU": "tests/transfer/test_on_a_gpu.py"}


def main() -> int:
    """Runs the suites; ranks are two processes, or threads, on the same GPU."""
    failed = False
    for name, path in (PRETENDED if DRY else SUITES).items():
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            path,
            *([] if DRY else ["-k", "not Pretend"]),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-500:]]
        shown = [lines[-1], *(line for line in lines if line.startswith(("SKIPPED", "FAILED", "ERROR")))]
        print(f"* {name}: exit code {done.returncode}", *(f"  * {line}" for line in shown), sep="\n", flush=True)
        failed |= done.returncode != 0
        failed |= any(line.startswith("SKIPPED") and not line.endswith("-sided") for line in lines)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
