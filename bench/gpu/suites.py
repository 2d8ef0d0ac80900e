"""Runs the conformance suites of transfer backends on the GPU, and the runtime's own equality tests with all ranks on this GPU.

Without a GPU, tests of streams on a simulated GPU and one equality test on the CPU run instead.
"""

from __future__ import annotations

import os
import subprocess
import sys

from bench.gpu.measure import DRY

# Name -> arguments of pytest. Ranks are two or three processes, or threads, on the same GPU.
TRANSFER = {
    "pinned_host": ["tests/transfer/test_pinned_host.py", "-k", "not Pretend"],
    "cupy_peer": ["tests/transfer/test_cupy_peer.py", "-k", "not Pretend"],
}
RUNTIME = {
    "stages of any plan against the dense model": ["tests/runtime/test_equality.py", "-k", "processes"],
    "known rows against counted ones, bit for bit": ["tests/runtime/test_replay.py", "-k", "processes"],
}
PRETENDED = {"on a pretended GPU": ["tests/transfer/test_on_a_gpu.py"]}
ON_CPU = {"one of them on a CPU": ["tests/runtime/test_equality.py", "-k", "processes_with_copies"]}


def main() -> int:
    """Runs the suites that are named, or all."""
    failed, chosen = False, {"transfer": PRETENDED if DRY else TRANSFER, "runtime": ON_CPU if DRY else RUNTIME}
    names = [name for name in chosen if name in sys.argv] or list(chosen)
    environment = os.environ | {"HYPOTHESIS_PROFILE": "ci"} | ({} if DRY else {"FOREMOE_TEST_DEVICE": "cuda"})
    for title, arguments in (item for name in names for item in chosen[name].items()):
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-500:]]
        told = [line for line in lines if line.startswith(("SKIPPED", "FAILED", "ERROR"))]
        print(f"* {title}: exit code {done.returncode}", *(f"  * {line}" for line in (lines[-1], *told)), sep="\n", flush=True)
        if done.returncode:
            print("\n```\n" + done.stdout[-5000:] + "\n```\n", flush=True)
        failed |= done.returncode != 0
        failed |= any(line.startswith("SKIPPED") and not line.endswith("-sided") for line in lines)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
