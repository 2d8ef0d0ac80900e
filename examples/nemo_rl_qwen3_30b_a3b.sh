#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B on 8 nodes of 8 GPUs with NeMo-RL's own recipe for router replay, and foremoe. Run it in NeMo-RL's container.
# A recipe to start from: it has not been run (no GPU was at hand). foremoe must be installed in the environment of the driver and
# in that of the Megatron workers; with NEMO_RL_PY_EXECUTABLES_SYSTEM=1 the two are one.
set -euo pipefail

NEMO_RL=${NEMO_RL:?checkout of NVIDIA-NeMo/RL}
export NEMO_RL_PY_EXECUTABLES_SYSTEM=${NEMO_RL_PY_EXECUTABLES_SYSTEM:-1}

options=(
    --config examples/configs/recipes/llm/grpo-qwen3-30ba3b-8n8g-megatron-cp2-r3.yaml

    # The recipe sets it already; without it foremoe does nothing.
    policy.router_replay.enabled=true

    # foremoe's: the settings of docs/verl.md. One slot per GPU for replicas of hot experts.
    +policy.foremoe.redundant=1
)

cd "$NEMO_RL"
# In the place of: python examples/run_grpo.py
python -m foremoe.integrations.nemo_rl examples/run_grpo.py "${options[@]}" "$@"
