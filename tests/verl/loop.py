"""veRL's own trainers and workers on a real Ray, without GPUs; rollout alone is a stand-in.

    python tests/verl/loop.py FOLDER ARM ...

Every arm trains for a few steps. It leaves in FOLDER/ARM what the trainer's logger received, and the weights after every step.
"""

import itertools
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

TESTS = Path(__file__).resolve().parents[1]
PATHS = [str(TESTS.parent), str(TESTS / "verl"), str(TESTS / "megatron")]
sys.path[:0] = PATHS

import loop_rollout as rollout  # noqa: E402

OBJECT_STORE = 80 << 20

COMMON = [
    "model_engine=megatron", "algorithm.adv_estimator=grpo",
    f"data.train_batch_size={rollout.PROMPTS}", "data.val_batch_size=1", "data.dataloader_num_workers=0",
    f"data.custom_cls.path={TESTS / 'verl' / 'loop_rollout.py'}", "data.custom_cls.name=Prompts",
    "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.calculate_log_probs=False",
    "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=loop_rollout.AgentLoop",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    # Several mini-batches and epochs; micro-batches by tokens; offload between all stages.
    "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=56",
    "actor_rollout_ref.actor.megatron.param_offload=True", "actor_rollout_ref.actor.megatron.optimizer_offload=True",
    # With a small eps Adam turns a gradient that is zero but for rounding into a full step.
    "actor_rollout_ref.actor.optim.lr=1e-2", "+actor_rollout_ref.actor.optim.override_optimizer_config.adam_eps=1e-4",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
    "trainer.nnodes=1", "trainer.logger=[file]", "trainer.resume_mode=disable", "trainer.save_freq=-1", "trainer.test_freq=-1",
    "trainer.val_before_train=False", f"trainer.total_training_steps={rollout.STEPS}", "trainer.total_epochs=1",
]  # fmt: skip
R3 = ["actor_rollout_ref.rollout.enable_rollout_routing_replay=True", "actor_rollout_ref.actor.megatron.router_replay.mode=R3"]
R2 = ["actor_rollout_ref.actor.megatron.router_replay.mode=R2"]
TWO = ["trainer.n_gpus_per_node=2"]
PIPELINE = ["trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"]
# `RayPPOTrainer`, and the trainer over TransferQueue, which is veRL's default.
V0, V1 = ["trainer.use_v1=False"], ["trainer.use_v1=True", "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"]
FOREMOE = [
    "actor_rollout_ref.actor.megatron._target_=foremoe.integrations.verl.EngineConfig",
    "+actor_rollout_ref.actor.megatron.foremoe.redundant=1",
    # Toy sizes gain no predicted time from a replica.
    "+actor_rollout_ref.actor.megatron.foremoe.cost=balance",
]
ARMS = {"R3": [*R3, *V0, *PIPELINE], "R2": [*R2, *V0, *TWO], "V1": [*R3, *V1, *TWO]}
ARMS |= {f"{name}-foremoe": [*arm, *FOREMOE] for name, arm in ARMS.items()}
ARMS["V1-foremoe"].append("+actor_rollout_ref.actor.megatron.foremoe.packing=True")


def main(folder, arms):
    import ray

    # Workers inherit it.
    paths = [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    model = folder / "model"
    write_model(model)
    ray.init(num_cpus=16, num_gpus=4, include_dashboard=False, object_store_memory=OBJECT_STORE)
    for name in arms:
        out = folder / name
        out.mkdir()
        os.environ["VERL_FILE_LOGGER_PATH"] = str(out / "logged.jsonl")
        places = [f"actor_rollout_ref.model.path={model}", f"+actor_rollout_ref.rollout.engine_kwargs.vllm.folder={out}"]
        train(compose([*COMMON, *places, *ARMS[name]]))
        for group in ray.util.placement_group_table().values():
            if group["state"] != "REMOVED":  # its workers end, too
                ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))
    ray.shutdown()


def write_model(folder):
    """Config and tokenizer, as a hub has them, of the test program's model."""
    from program import FFN, HEADS, HIDDEN, VOCABULARY, E, K
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

    Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=FFN, moe_intermediate_size=FFN,
        num_hidden_layers=rollout.LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HIDDEN // HEADS,
        num_experts=E, num_experts_per_tok=K, architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    words = models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="1")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="1").save_pretrained(folder)


def compose(overrides):
    from hydra import compose, initialize_config_module
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    return config


def train(config):
    """As ``python -m verl.trainer.main_ppo`` does, whose task runner works in this process."""
    import verl.checkpoint_engine
    import verl.experimental.reward_loop
    import verl.workers.engine_workers
    from loop_worker import CpuWorker
    from verl.trainer import main_ppo, main_ppo_v0
    from verl.trainer.ppo import ray_trainer
    from verl.trainer.ppo.v1 import trainer_base

    instead = {
        "ActorRolloutRefWorker": CpuWorker, "RewardLoopManager": rollout.Absent, "LLMServerManager": rollout.Absent,
        "CheckpointEngineManager": rollout.Weights,
    }  # fmt: skip
    users = verl.workers.engine_workers, verl.experimental.reward_loop, verl.checkpoint_engine, ray_trainer, trainer_base
    with ExitStack() as stack:
        for user, (name, stand_in) in itertools.product(users, instead.items()):
            if hasattr(user, name):
                stack.enter_context(patch.object(user, name, stand_in))
        runner = main_ppo.TaskRunnerV1 if config.trainer.use_v1 else main_ppo_v0.TaskRunner
        runner.__ray_metadata__.modified_class().run(config)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
