"""Options of trainers' own MoE recipes, as the trainers resolve them, in Megatron-Core's names; no part of foremoe.

    FOREMOE_VERL=... FOREMOE_SLIME=... FOREMOE_NEMO_RL=... FOREMOE_SKYRL=... python tests/megatron/resolve.py [--write]

Compares what checkouts say with `recipes.json`, or writes it; a trainer without a checkout keeps its records. `recipes.json` has
only what attaching reads and what decides how layers run, with the commit. Needs hydra and omegaconf.

* veRL: its recipe is run with a stand-in for Python, its arguments are composed by Hydra over its own config, as `main_ppo` does.
* NeMo-RL: its own `nemo_rl/utils/config.py` loads the YAML with all that it inherits.
* SkyRL: its recipe is run likewise, its arguments are merged into its own dataclasses.
* slime: arguments of the recipe and of the model that it sources are read, over Megatron's and slime's defaults.
"""

import ast
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

RECORD = Path(__file__).with_name("recipes.json")
SHIPPED = Path(__file__).parents[2] / "examples"
VARIABLES = {"veRL": "FOREMOE_VERL", "slime": "FOREMOE_SLIME", "NeMo-RL": "FOREMOE_NEMO_RL", "SkyRL": "FOREMOE_SKYRL"}
RECIPES = {
    "veRL": (
        "verl_qwen3_30b_a3b.sh", "examples/router_replay/run_qwen3_30b_a3b_megatron.sh",
        "examples/grpo_trainer/run_qwen3_235b_a22b_megatron.sh", "examples/grpo_trainer/run_moonlight_16b_a3b_megatron.sh",
        "examples/grpo_trainer/run_deepseek_v3_671b_megatron.sh", "examples/dppo_trainer/run_qwen3_30b_a3b_megatron.sh",
    ),
    "slime": (
        "slime_qwen3_30b_a3b.sh", "scripts/run-qwen3-30B-A3B.sh", "scripts/run-qwen3-235B-A22B.sh", "scripts/run-deepseek-r1.sh",
        "scripts/run-moonlight-16B-A3B.sh", "scripts/low_precision/run-qwen3-30b-a3b-fp8.sh",
    ),
    "NeMo-RL": (
        "nemo_rl_qwen3_30b_a3b.sh", "examples/configs/grpo_math_qwen30ba3b_megatron.yaml",
        "examples/configs/recipes/llm/grpo-moonlight-16ba3b-4n8g-megatron.yaml",
        "examples/configs/recipes/llm/grpo-moonlight-16ba3b-4n8g-megatron-fp8-e2e.yaml",
        "examples/configs/recipes/llm/performance/grpo-qwen3-235b-16n8g.yaml",
        "examples/configs/recipes/llm/performance/grpo-deepseek-v3-32n8g.yaml",
    ),
    "SkyRL": (
        "examples/train/router_replay/run_moonlight16b_router_replay.sh",
        "examples/train/megatron/run_megatron_dapo_qwen3_30b_a3b.sh", "examples/train/megatron/run_megatron_qwen3-235b-a22b.sh",
        "examples/train/megatron/run_megatron_dapo_qwen3_30b_a3b_lora.sh",
    ),
}  # fmt: skip
# What is kept: of groups, of `TransformerConfig`, of DDP, of the optimizer.
PARALLEL = """
tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size
expert_model_parallel_size expert_tensor_parallel_size
"""
MODEL = """
sequence_parallel moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep moe_grouped_gemm moe_permute_fusion
moe_shared_expert_overlap moe_shared_expert_intermediate_size moe_router_dtype moe_expert_capacity_factor
moe_pad_expert_input_to_capacity recompute_granularity recompute_method recompute_num_layers recompute_modules
gradient_accumulation_fusion bias_activation_fusion cuda_graph_impl cuda_graph_scope fp8 fp4 add_bias_linear
overlap_moe_expert_parallel_comm delay_wgrad_compute transformer_impl bf16 mtp_num_layers peft
"""
DDP = "grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather use_distributed_optimizer average_in_collective"
OPTIMIZER = "use_precision_aware_optimizer optimizer_cpu_offload"


def command_of(script, checkout, **variables):
    """Arguments with which a recipe would start Python. Nothing else runs: there are no other programs."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("python", "python3", "uv"):
            (Path(folder) / name).write_text(f'#!/bin/bash\n[ "$1" = -c ] && exit 1\nprintf "%s\\n" "$@" > {folder}/arguments\n')
            (Path(folder) / name).chmod(0o755)
        for name in ("date", "mkdir", "sleep", "ray"):  # which recipes want to succeed
            (Path(folder) / name).write_text("#!/bin/bash\n")
            (Path(folder) / name).chmod(0o755)
        environ = {"PATH": folder, "HOME": folder, "DEVICE": "gpu", "VERL_USE_UV": "0", "DATA": folder} | variables
        done = subprocess.run(["/bin/bash", str(script)], cwd=checkout, env=environ, capture_output=True, text=True, check=False)
        if not (Path(folder) / "arguments").exists():
            raise SystemExit(f"{script} did not start Python: {done.stderr[-500:]}")
        return (Path(folder) / "arguments").read_text().splitlines()


def kept(**parts):
    """Of resolved options by part those that are recorded and are set."""
    wanted = {"parallel": PARALLEL, "model": MODEL, "ddp": DDP, "optimizer": OPTIMIZER}
    return {
        part: {name: parts[part][name] for name in names.split() if parts[part].get(name) is not None}
        for part, names in wanted.items()
    }


def of_verl(checkout, recipe):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    script = checkout / recipe if "/" in recipe else SHIPPED / recipe
    given = [argument for argument in command_of(script, checkout) if re.match(r"[+~]*[\w.@/]+=", argument)]
    # One recipe gives an argument that veRL's config of the same commit does not have, and leaves the one out that was meant.
    given = [argument for argument in given if ".foremoe." not in argument and ".actor.model_engine=" not in argument]
    given = list(dict.fromkeys([*given, "model_engine=megatron"]))
    with initialize_config_dir(str(checkout / "verl/trainer/config"), version_base=None):
        actor = OmegaConf.to_container(compose("ppo_trainer", given).actor_rollout_ref.actor, resolve=True)
    engine, optim = actor["megatron"], actor["optim"].get("override_optimizer_config") or {}
    # As `_build_tf_config` and `_resolve_override_ddp_config` of its Megatron engine have it.
    model = {"moe_token_dispatcher_type": "alltoall", "sequence_parallel": engine["sequence_parallel"], "moe_grouped_gemm": True}
    model |= {"bf16": engine.get("dtype", "bfloat16") == "bfloat16", **(engine["override_transformer_config"] or {})}
    ddp = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": engine["use_distributed_optimizer"]}
    return kept(parallel=engine, model=model, ddp=ddp | (engine.get("override_ddp_config") or {}), optimizer=optim)


def of_skyrl(checkout, recipe):
    from omegaconf import OmegaConf

    absent = types.SimpleNamespace(SearchEnvConfig=type("SearchEnvConfig", (), {}), Text2SQLEnvConfig=type("Text", (), {}))
    for name in ("skyrl_gym", "skyrl_gym.envs", "skyrl_gym.envs.search", "skyrl_gym.envs.sql"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["skyrl_gym.envs.search.env"] = sys.modules["skyrl_gym.envs.sql.env"] = absent
    path = checkout / "skyrl/train/config/config.py"
    spec = importlib.util.spec_from_file_location("skyrl_config", path)
    module = sys.modules["skyrl_config"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    prefix = "trainer.policy."
    given = [a.removeprefix(prefix) for a in command_of(checkout / recipe, checkout) if a.startswith(prefix)]
    policy = OmegaConf.from_dotlist([a for a in given if a.startswith(("megatron_config.", "model.lora."))])
    default = OmegaConf.create(dataclasses.asdict(module.MegatronConfig()))
    config = OmegaConf.to_container(OmegaConf.merge(default, policy.get("megatron_config") or {}), resolve=True)
    # As its Megatron worker sets the model up.
    rank = int((OmegaConf.select(policy, "model.lora.rank")) or 0)
    model = {**config, "sequence_parallel": config["tensor_model_parallel_size"] > 1, "bf16": True}
    model |= {**config["transformer_config_kwargs"], "peft": True if rank else None}
    ddp = {"use_distributed_optimizer": True, **config["ddp_config"]}
    return kept(parallel=config, model=model, ddp=ddp, optimizer=config["optimizer_config_kwargs"])


def of_nemo_rl(checkout, recipe):
    from omegaconf import OmegaConf

    path = checkout / "nemo_rl/utils/config.py"
    spec = importlib.util.spec_from_file_location("nemo_rl_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.register_omegaconf_resolvers()
    given = []
    if "/" not in recipe:
        arguments = command_of(SHIPPED / recipe, checkout, NEMO_RL=str(checkout))
        recipe = arguments[arguments.index("--config") + 1]
        given = [a for a in arguments if a.startswith("policy.")]
    config = module.parse_hydra_overrides(module.load_config(checkout / recipe), given)
    policy = OmegaConf.to_container(config, resolve=False)["policy"]
    megatron = policy["megatron_cfg"]
    fp8 = megatron.get("fp8_cfg") or {}
    model = {**megatron, **(megatron.get("model_overrides") or {}), "bf16": policy["precision"] == "bfloat16"}
    model["fp8"] = fp8.get("fp8") if fp8.get("enabled") else None
    model["peft"] = True if (megatron.get("peft") or {}).get("enabled") else None
    # As `_apply_performance_config` has it.
    if not megatron.get("activation_checkpointing"):
        model |= dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"))
    elif megatron.get("recompute_granularity") == "full":
        model |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    optimizer = megatron["optimizer"]
    ddp = {**megatron["distributed_data_parallel_config"], "average_in_collective": False}
    ddp["use_distributed_optimizer"] = optimizer["use_distributed_optimizer"]
    return kept(parallel=megatron, model=model, ddp=ddp, optimizer=optimizer)


def of_slime(checkout, recipe):
    text = (checkout / recipe if "/" in recipe else SHIPPED / recipe).read_text()
    model_script = re.search(r"scripts/models/\S+?\.sh|(?<=/)models/\S+?\.sh", text)[0].removeprefix("scripts/")
    given = {}
    for part in ((checkout / "scripts" / model_script).read_text(), text):
        for name, value in re.findall(r"^\s*--([\w-]+)(?:[ =]+([^\s\\]+))?", part, re.MULTILINE):
            given[name.replace("-", "_")] = True if not value or value.startswith(("-", "#")) else value.strip("\"'")
    options = {name: value if value is True else _literal(value) for name, value in given.items()}
    if "moe_shared_expert_intermediate_size" in options:
        options["moe_shared_expert_intermediate_size"] = True  # some are sums of shell variables
    # Defaults of Megatron's parser, and slime's `_set_default_megatron_args`.
    model = {"moe_token_dispatcher_type": "allgather", "gradient_accumulation_fusion": True, "bias_activation_fusion": True}
    model |= options | {"bf16": True, "add_bias_linear": not options.get("disable_bias_linear")}
    model |= {"fp8": options.get("fp8_format"), "sequence_parallel": bool(options.get("sequence_parallel"))}
    ddp = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": bool(options.get("accumulate_allreduce_grads_in_fp32"))}
    ddp |= {name: bool(options.get(name)) for name in ("overlap_grad_reduce", "overlap_param_gather")}
    return kept(parallel=options, model=model, ddp=ddp, optimizer=options)


def _literal(value):
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return value


RESOLVERS = {"veRL": of_verl, "slime": of_slime, "NeMo-RL": of_nemo_rl, "SkyRL": of_skyrl}


def commit_of(checkout):
    file = checkout / ".commit"  # of an unpacked archive
    if file.exists():
        return file.read_text().strip()
    return subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def resolved(before):
    """The record, with the parts of the trainers whose checkouts are named made anew."""
    found = {}
    for trainer, recipes in RECIPES.items():
        checkout = os.environ.get(VARIABLES[trainer])
        if not checkout:
            print(f"{trainer}: kept as recorded; {VARIABLES[trainer]} names no checkout", file=sys.stderr)
            found[trainer] = before.get(trainer, {})
            continue
        checkout = Path(checkout).resolve()
        found[trainer] = {"commit": commit_of(checkout), "command": f"{VARIABLES[trainer]}=CHECKOUT make resolve"}
        found[trainer]["recipes"] = {recipe: RESOLVERS[trainer](checkout, recipe) for recipe in recipes}
    return found


def main():
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found = resolved(before)
    if "--write" in sys.argv:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    for trainer, of in found.items():
        for recipe, options in of.get("recipes", {}).items():
            recorded = before.get(trainer, {}).get("recipes", {}).get(recipe)
            if options != recorded:
                print(f"{trainer}, {recipe}: resolves to {options}; recorded is {recorded}", file=sys.stderr)
    same = [of.get("recipes") for of in found.values()] == [before.get(trainer, {}).get("recipes") for trainer in found]
    print(f"{sum(len(of.get('recipes', {})) for of in found.values())} recipes: {'as recorded' if same else 'not as recorded'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
