"""examples/megatron_gpt.py on Megatron-Core, two expert-parallel ranks on one GPU: the same losses with foremoe and without?"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec

from bench.gpu.measure import DRY, table

RANKS, LIMIT_S = 2, 240.0
SIZES = ["--steps", "3"]
# Megatron-Core 0.16.1 asks for this name on GPUs, and defines it only where Transformer Engine is installed.
START = """
import runpy, sys
from megatron.core.transformer.moe import moe_utils
vars(moe_utils).setdefault("te_general_gemm", None)
sys.argv = ["examples/megatron_gpt.py", *sys.argv[1:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*options: str) -> list[tuple[str, str]]:
    """Loss of each step, as printed, and what foremoe says beside it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = list[subprocess.Popen[str]]()
    for rank in range(RANKS):
        # NCCL refuses two ranks of one host on one GPU, so each says that it is a host of its own.
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port, "NCCL_HOSTID": f"rank-{rank}"}
        fixed = {"MASTER_ADDR": "127.0.0.1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environment = (
            os.environ | {name: str(value) for name, value in own.items()} | fixed | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        )
        command = [sys.executable, "-W", "ignore", "-c", START, "--ep", str(RANKS), *SIZES, *options]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment))
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(process.returncode for process in ranks):
        print("```\n" + "\n".join(text[-3000:] for text in outputs) + "\n```", flush=True)
        raise SystemExit(1)
    return re.findall(r"step \d+: loss ([\d.]+), [\d.]+ s ?(.*)", outputs[0])


def main() -> int:
    """Prints the losses of both side by side; those of any two steps that differ end in code 1."""
    if DRY:
        print("Megatron's example needs a GPU; tests/megatron run it with CUDA's calls replaced.")
        return 0
    if find_spec("megatron") is None:
        print("megatron-core is not installed.")
        return 1
    without, with_foremoe = run("--without-foremoe"), run()
    rows = [
        f"{step} | {a} | {b} | {figures or '-'}"
        for step, ((a, _), (b, figures)) in enumerate(zip(without, with_foremoe, strict=True))
    ]
    table("step | loss without foremoe | with foremoe | figures", *rows)
    apart = max(abs(float(a) - float(b)) for (a, _), (b, _) in zip(without, with_foremoe, strict=True))
    print(f"\nLargest difference of a loss: {apart:.1e}; float32, {RANKS} ranks, the last digit that is printed may differ.")
    return int(not without or apart > 2e-6)


if __name__ == "__main__":
    sys.exit(main())
