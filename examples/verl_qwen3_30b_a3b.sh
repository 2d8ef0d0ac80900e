#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B on nodes of 8 GPUs with veRL 0.9 and its Megatron engine, router replay R3, and foremoe.
# A recipe to start from: it has not been run (no GPU was at hand); model, data and batch sizes are the usual ones of such runs.
#
#   DATA=... examples/verl_qwen3_30b_a3b.sh             # 1 node: EP8, Megatron's all-to-all
#   DATA=... NODES=2 examples/verl_qwen3_30b_a3b.sh     # 2 nodes: EP16, DeepEP, which must be installed
#   DATA=... NODES=8 EP=8 TP=4 PP=8 ENDS=11 RECOMPUTE=full ROLLOUT_TP=8 SLOTS=2 MODEL=Qwen/Qwen3-235B-A22B \
#       examples/verl_qwen3_30b_a3b.sh actor_rollout_ref.rollout.gpu_memory_utilization=0.85
#
# For several nodes, start Ray on all of them, and run this on its head. The last call has the fastest layout that fits, according
# to `foremoe advise`. ENDS is the number of layers of the first and of the last pipeline rank: 94 layers do not divide by 8. The
# update needs recomputation: `foremoe simulate` puts it at 37 GB per GPU, and at 139 GB without. Rollout holds 59 GB of weights
# per GPU in it.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}
DATA=${DATA:?folder with train.parquet and test.parquet}
NODES=${NODES:-1} TP=${TP:-2} PP=${PP:-1}
EP=${EP:-$((8 * NODES / PP))}
if ((8 * NODES % (TP * PP) || 8 * NODES % (EP * PP) || 128 % EP)); then
    echo "TP * PP = $((TP * PP)) and EP * PP = $((EP * PP)) must divide $((8 * NODES)) GPUs, and EP = $EP 128 experts." >&2
    exit 1
fi

recompute=()
if [ "${RECOMPUTE:-}" = full ]; then
    recompute=(
        +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
        +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
        +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
    )
fi

ends=()
if [ -n "${ENDS:-}" ]; then
    ends=(
        +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage="$ENDS"
        +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage="$ENDS"
    )
fi

# Across nodes, DeepEP sends a token once to each node. foremoe sees which dispatcher is set, and plans for it.
dispatcher=()
if [ "$EP" -gt 8 ]; then
    dispatcher=(
        +actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex
        +actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep=True
        +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
    )
fi

options=(
    # The algorithm and the data.
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=128
    data.max_prompt_length=1024
    data.max_response_length=8192
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.rollout.n=8

    # The actor trains on Megatron-Core: by default, all ranks of a pipeline stage are one EP group, and tensor-parallel ranks split tokens.
    model_engine=megatron
    actor_rollout_ref.actor.megatron.expert_model_parallel_size="$EP"
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$TP"
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$PP"
    actor_rollout_ref.actor.megatron.sequence_parallel=True
    actor_rollout_ref.actor.megatron.param_offload=True
    actor_rollout_ref.actor.megatron.optimizer_offload=True
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    "${recompute[@]}"
    "${ends[@]}"
    "${dispatcher[@]}"

    # Rollout by vLLM.
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size="${ROLLOUT_TP:-4}"

    # veRL's own two settings for router replay: rollout hands over the experts of every token, training replays them.
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True
    actor_rollout_ref.actor.megatron.router_replay.mode=R3

    # foremoe's two: an engine config that knows one more key, and slots per GPU for replicas of hot experts (`foremoe advise`).
    actor_rollout_ref.actor.megatron._target_=foremoe.integrations.verl.EngineConfig
    +actor_rollout_ref.actor.megatron.foremoe.redundant="${SLOTS:-1}"
    # Micro-batches whose samples want different experts, within each rank's share of a mini-batch.
    # +actor_rollout_ref.actor.megatron.foremoe.packing=True
    # Keep every stage's counts, to compare strategies off line: foremoe compare FILE
    # +actor_rollout_ref.actor.megatron.foremoe.dump="$PWD/foremoe-workloads"

    trainer.n_gpus_per_node=8
    trainer.nnodes="$NODES"
    trainer.logger='["console"]'
    trainer.total_epochs=1
)

python -m verl.trainer.main_ppo "${options[@]}" "$@"
