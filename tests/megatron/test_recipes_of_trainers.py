"""Every MoE recipe of a trainer runs by plans as without, or ends when the job starts, with the override to write.

`recipes.json` has what trainers make of their own recipes (resolve.py; `make resolve` makes it again). A small model gets exactly
a recipe's options of DDP, of the dispatcher, of recomputation and of experts; parallel sizes above two are two. What a CPU does
not have stays as it is in program.py: fused permutation, activation and rotary kernels, context parallelism, the optimizer's
precision and offloading. Experts are `TEGroupedMLP` over a stand-in, which adds weight gradients to float32 where they are fused.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import compare
import pytest
from layouts import Case
from program import Layout

from foremoe.base.errors import InputError
from foremoe.integrations import nemo_rl, slime
from foremoe.integrations.supported import Parallel, hydra, refusal_of

RECORD = json.loads(Path(__file__).with_name("recipes.json").read_text())
RECIPES = [(trainer, recipe, options) for trainer, of in RECORD.items() for recipe, options in of["recipes"].items()]
# Recipes that foremoe cannot run with, and what to write instead.
REFUSED = {
    "examples/grpo_trainer/run_qwen3_235b_a22b_megatron.sh": "expert_tensor_parallel_size=1",
    "scripts/low_precision/run-qwen3-30b-a3b-fp8.sh": "no --fp8-format",
    "examples/configs/recipes/llm/grpo-moonlight-16ba3b-4n8g-megatron-fp8-e2e.yaml": (
        "++policy.megatron_cfg.fp8_cfg.enabled=false"
    ),
    "examples/train/megatron/run_megatron_dapo_qwen3_30b_a3b_lora.sh": "peft",
}  # fmt: skip
# Options that are used as recorded; all others of TransformerConfig are said above, or in the layout.
AS_THEY_ARE = (
    "moe_router_dtype", "moe_shared_expert_overlap", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "recompute_modules", "moe_enable_deepep",
)  # fmt: skip


def case_of(options):
    """A small layout with a recipe's options."""
    parallel, model, ddp = options["parallel"], options["model"], dict(options["ddp"])
    tp, pp = (min(parallel.get(f"{kind}_model_parallel_size", 1), 2) for kind in ("tensor", "pipeline"))
    used = {name: model[name] for name in AS_THEY_ARE if name in model}
    backend = model.get("moe_flex_dispatcher_backend", "deepep")
    shared = bool(model.get("moe_shared_expert_intermediate_size"))
    if not shared:
        used.pop("moe_shared_expert_overlap", None)
    layout = Layout(
        ep=2, tp=tp, pp=pp, num_layers=2 * pp, M=2, bf16=model["bf16"], shared_experts=shared,
        dispatcher=backend if model["moe_token_dispatcher_type"] == "flex" else "alltoall",
        engine="Fused" if model.get("gradient_accumulation_fusion") else "GroupedLinear",
        distributed=ddp.pop("use_distributed_optimizer"), narrow=not ddp.pop("grad_reduce_in_fp32"),
        overlap_grad=ddp.pop("overlap_grad_reduce", False), overlap_param=ddp.pop("overlap_param_gather", False),
        options=tuple((name, tuple(x) if isinstance(x, list) else x) for name, x in used.items()), ddp=tuple(ddp.items()),
    )  # fmt: skip
    return Case(4, layout)


CASES = {}  # case -> its recipes
for _, recipe, options in RECIPES:
    if recipe not in REFUSED:
        CASES.setdefault(case_of(options), []).append(Path(recipe).stem)


def test_there_are_enough_of_every_trainer():
    assert {trainer: len(of["recipes"]) >= 3 for trainer, of in RECORD.items()} == dict.fromkeys(
        ("veRL", "slime", "NeMo-RL", "SkyRL"), True
    )
    assert all(re.fullmatch("[0-9a-f]{40}", of["commit"]) and of["command"] for of in RECORD.values())
    assert len(RECIPES) - len(REFUSED) >= 12
    assert REFUSED.keys() <= {recipe for _, recipe, _ in RECIPES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "+".join(CASES[case]))
def test_two_stages_are_equal(pool, case):
    verdicts = pool.run(compare.one_step, case, num_ranks=case.num_ranks)
    for rank, verdict in enumerate(verdicts):
        assert verdict.equal and verdict.served and verdict.drift == 0 and verdict.fell_back == 0, (rank, verdict)
    assert all(verdict.replicas for verdict in verdicts)


def refusal_at_start(trainer, options):
    """What a job with a recipe is told before it has a model; empty if nothing."""
    parallel, model = options["parallel"], options["model"]
    try:
        if trainer == "slime":
            slime.install(SimpleNamespace(use_routing_replay=True, **parallel, **model))
        elif trainer == "NeMo-RL":
            fp8 = {"fp8_cfg": {"enabled": bool(model.get("fp8")), "fp8": model.get("fp8")}}
            nemo_rl.settings_of({"foremoe": {}, "megatron_cfg": {**parallel, **model, **fp8}})
        else:
            refusal = refusal_of(model.get, Parallel.of(parallel.get))
            if refusal is not None:
                raise refusal.error(hydra(""))
    except ModuleNotFoundError:  # nothing was refused: slime itself would come next
        return ""
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("trainer", "recipe", "options"), RECIPES, ids=lambda x: x if isinstance(x, str) else "")
def test_others_are_refused_when_the_job_starts(trainer, recipe, options):
    if options["model"].get("peft"):
        pytest.skip("adapters are refused when attaching: test_megatron_experts.py")
    said = refusal_at_start(trainer, options)
    assert said.endswith(f"; write {REFUSED[recipe]}.") if recipe in REFUSED else not said
