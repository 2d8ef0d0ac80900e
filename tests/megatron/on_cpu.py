"""Runs a Megatron-Core program on CPU: ``torchrun --nproc_per_node 2 tests/megatron/on_cpu.py PROGRAM [ARGUMENTS]``."""

import runpy
import sys
import warnings

import cpu
import torch

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cpu.run_on_cpu()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
