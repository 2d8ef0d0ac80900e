"""Repeats the small cases of the layer under compute-sanitizer, which reports accesses outside of allocated memory."""

from __future__ import annotations

import shutil
import subprocess
import sys

from bench.gpu.measure import DRY


def main() -> int:
    """Prints the last lines of the tool's report."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if DRY or tool is None:
        print("There is no compute-sanitizer here.")
        return int(not DRY)
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "bench.gpu.layer_right", "--small"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    print(f"memcheck: exit code {done.returncode}", *lines[:20], lines[-1] if lines else done.stdout[-1500:], sep="\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
