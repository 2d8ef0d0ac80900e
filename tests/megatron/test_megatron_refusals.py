"""Layouts that are not supported are refused when attaching, with the option to change."""

import contextlib
from unittest.mock import patch

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig
from program import Layout, Program

from foremoe.base.errors import InputError, TransferError

# From 0.18 on it has another name, and the old one is always None.
GRAPHS = "cuda_graph_modules" if hasattr(TransformerConfig, "cuda_graph_modules") else "cuda_graph_scope"

# Options of TransformerConfig, and what the refusal says to set.
OPTIONS = [
    ({"moe_token_dispatcher_type": "allgather"}, "set moe_token_dispatcher_type='alltoall'"),
    ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"}, "set moe_flex_dispatcher_backend='deepep'"),
    ({"moe_expert_rank_capacity_factor": 1.5}, "moe_expert_rank_capacity_factor and"),
    ({"moe_expert_capacity_factor": 1.0}, "leave moe_expert_capacity_factor"),
    ({"moe_pad_expert_input_to_capacity": True}, "leave moe_expert_capacity_factor"),
    ({"cuda_graph_impl": "local", GRAPHS: []}, GRAPHS),
    ({"cuda_graph_impl": "transformer_engine", GRAPHS: ["moe_router"]}, GRAPHS),
    ({"overlap_moe_expert_parallel_comm": True}, "set overlap_moe_expert_parallel_comm=False"),
    ({"delay_wgrad_compute": True}, "delay_wgrad_compute=False"),
    ({"fp8": "hybrid"}, "set fp8=None"),
    ({"fp4": "e2m1"}, "set fp8=None, fp4=None"),
    ({"moe_router_padding_for_quantization": True}, "no router padding"),
    ({"moe_router_padding_for_fp8": True}, "no router padding"),
    ({"use_kitchen": True}, "set use_kitchen=False"),
    (
        {"num_microbatches_with_partial_activation_checkpoints": 1},
        "set num_microbatches_with_partial_activation_checkpoints=None",
    ),
    ({"cuda_graph_impl": "local", "cuda_graph_modules": []}, "cuda_graph_modules"),
    ({"moe_paged_stash": True}, "set moe_paged_stash=False"),
    ({"moe_single_grouped_weight": True}, "set moe_single_grouped_weight=False"),
    ({"use_transformer_engine_op_fuser": True}, "set use_transformer_engine_op_fuser=False"),
    ({"overlap_dispatch_backward_with_experts_wgrad": True}, "set overlap_dispatch_backward_with_experts_wgrad=False"),
    ({"expert_gtp_weight_remat_size": 2}, "set expert_gtp_weight_remat_size=1"),
    ({"quant_recipe": "recipe"}, "set quant_recipe=None"),
    ({"transformer_impl": "inference_optimized"}, "set transformer_impl='transformer_engine'"),
    ({"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion=False"),
]


@contextlib.contextmanager
def of_class(owner, name, base):
    kind = owner.__class__
    owner.__class__ = type(name, (base,), {})
    try:
        yield
    finally:
        owner.__class__ = kind


def refusals(_group, layout, each, sizes):
    """Returns the refusals of `attach` for each of these options, and what it left in the model. The last time has no option."""
    from megatron.core import parallel_state

    from foremoe.integrations.megatron import attach

    program, found = Program(layout), []
    moe, config = program.bare[0].decoder.layers[0].mlp, program.config
    changes = {
        "dispatcher": lambda value: patch.object(moe, "token_dispatcher", value),
        "subclass": lambda _: of_class(moe.token_dispatcher, "OtherDispatcher", type(moe.token_dispatcher)),
        "experts": lambda _: of_class(moe.experts, "OtherExperts", type(moe.experts).__base__),
    }
    for options in (*each, {}):
        said = ""
        with contextlib.ExitStack() as stack:
            for name, n in sizes.items() if options or not each else ():
                stack.enter_context(patch.object(parallel_state, name, lambda n=n: n))
            for name, value in options.items():
                change = changes.get(name, lambda value, name=name: patch.object(config, name, value, create=True))
                stack.enter_context(change(value))
            try:
                attach(program.chunks).detach()
            except InputError as error:
                said = str(error)
        found.append((said, [name for m in program.chunks[0].modules() for name in vars(m) if "foremoe" in name]))
    return found


def refused(pool, layout, *each, **sizes):
    """Each of some options is refused with its cure, and nothing is without them."""
    for found in pool.run(refusals, layout, [options for options, _ in each], sizes, num_ranks=2 * layout.pp):
        assert [left for _, left in found] == [[]] * len(found)
        *told, unchanged = [said for said, _ in found]
        assert unchanged == ""
        for (options, cure), said in zip(each, told, strict=True):
            assert cure in said and said.count(". ") == 0, (options, said)


def test_options(pool):
    refused(pool, Layout(), *OPTIONS)


def test_tensor_parallelism_without_sequence_parallelism(pool):
    refused(pool, Layout(tp=2), ({"sequence_parallel": False}, "set sequence_parallel=True"))


def test_experts_split_over_tensor_parallel_ranks(pool):
    name = "get_expert_tensor_parallel_world_size"
    for ((said, left),) in pool.run(refusals, Layout(), [], {name: 2}, num_ranks=2):
        assert "set expert_tensor_parallel_size=1" in said and said.count(". ") == 0 and left == []


def test_another_interleaved_order(pool):
    layout = Layout(pp=2, vpp=2, num_layers=4)
    refused(pool, layout, ({"microbatch_group_size_per_vp_stage": 4}, "set it to 2"))


def test_another_dispatcher_than_the_config_says_and_an_unknown_kind_of_experts(pool):
    refused(
        pool,
        Layout(),
        ({"dispatcher": 7}, "moe_token_dispatcher_type='alltoall' and 'flex'"),
        ({"subclass": True}, "dispatches with OtherDispatcher; foremoe supports MoEAlltoAllTokenDispatcher"),
        ({"experts": True}, "experts of type OtherExperts are not supported"),
    )


def one_sided(group, options):
    """What the ranks are told when rank 1 alone gives `options`, or no model where they are None; then all attach."""
    from foremoe.integrations.megatron import attach

    program = Program(Layout())
    said = ""
    try:
        if options is None:
            attach(*() if group.rank == 1 else [program.chunks], group_timeout_s=1.0)
        else:
            attach(program.chunks, **options if group.rank == 1 else {})
    except (InputError, TransferError, TypeError) as error:
        said = f"{type(error).__name__}: {error}"
    group.barrier()
    attach(program.chunks).detach()
    return said


@pytest.mark.parametrize("options", [{"planner": "hierarchial"}, {"redundnt": 1}], ids=str)
def test_a_typo_of_one_rank_is_told_on_all(pool, options):
    other, own = pool.run(one_sided, options, num_ranks=2)
    assert own.startswith("InputError: there is no ")
    assert other == own.replace("InputError: ", "InputError: rank 1: ", 1)


def test_ranks_meet_again_after_one_did_not_come(pool):
    """Python itself refuses the call, so nobody can be told why."""
    other, own = pool.run(one_sided, None, num_ranks=2)
    assert own.startswith("TypeError: ")
    assert other.startswith("TransferError: rank 1 did not come to set up the group within 1.0 s")
