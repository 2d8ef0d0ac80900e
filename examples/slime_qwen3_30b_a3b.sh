#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B on one node of 8 GPUs with slime, rollout routing replay, and foremoe. Run it in slime's container.
# A recipe to start from: it has not been run (no GPU was at hand); model, data and batch sizes are those of slime's own script.
set -euo pipefail

SLIME=${SLIME:?checkout of THUDM/slime}
MODEL=${MODEL:?folder with the model as HuggingFace has it}
CHECKPOINT=${CHECKPOINT:?folder with the model as slime converts it to torch_dist}
DATA=${DATA:?jsonl file with prompt and label}

# foremoe's settings, as in docs/verl.md (JSON is YAML, too). This is all of foremoe but for one argument below.
CONFIG=$(mktemp --suffix .yaml)
echo '{"foremoe": {"redundant": 1}}' > "$CONFIG"

source "$SLIME/scripts/models/qwen3-30B-A3B.sh"

options=(
    "${MODEL_ARGS[@]}"
    --hf-checkpoint "$MODEL"
    --ref-load "$CHECKPOINT"

    # The algorithm and the data.
    --advantage-estimator grpo
    --prompt-data "$DATA"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --global-batch-size 256
    --balance-data

    # The actor trains on Megatron-Core: eight ranks are one EP group.
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 20480
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --optimizer-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32

    # Rollout by SGLang on the same GPUs.
    --colocate
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7

    # slime's own argument for routing replay.
    --use-rollout-routing-replay

    # foremoe's.
    --custom-megatron-init-path foremoe.integrations.slime.install
    --custom-config-path "$CONFIG"
)

cd "$SLIME"
python train.py "${options[@]}" "$@"
