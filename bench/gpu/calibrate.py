"""Runs `foremoe calibrate` with one rank on this GPU, and shows its constants, residuals and file. `replay` reads the file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from bench.gpu.measure import DRY

FILE = Path(tempfile.gettempdir()) / "foremoe-bench-gpu.toml"
SIZES = ["--hidden", "64", "--ffn", "32", "--experts", "8", "--topk", "2", "--tokens", "256", "--seconds", "3"]
SIZES = SIZES if DRY else ["--model", "qwen3-30b-a3b", "--tokens", "8192", "--seconds", "25"]


def main() -> int:
    """Prints the command's own report, and the file."""
    FILE.unlink(missing_ok=True)
    command = [sys.executable, "-m", "foremoe", "calibrate", "--ranks", "1", *SIZES, "-o", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"```\n{(done.stdout + done.stderr).strip()}\n```\n", flush=True)
    if done.returncode == 0:
        print(f"```toml\n{FILE.read_text().strip()}\n```")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
