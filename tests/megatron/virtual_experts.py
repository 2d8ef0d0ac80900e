"""A stand-in for Megatron-LM's virtual experts, for machines without GPUs; no part of foremoe.

Written from the interface and docstrings of ``virtual_expert_load_balancer.py`` in Megatron-LM's pull request 7450: every rank
has 2B runtime experts, its B own ones and B slots. `experts_to_copy` [ranks, B] names the expert whose weights a slot gets before
the experts run and whose gradient it gives back after; `virtual_experts` [tokens, topk] names the runtime expert of each pair.
Tokens go by Megatron's own HybridEP manager, over the stand-in of deepep.py. Every call asserts what the interface asks for.
"""

import functools
import importlib
import sys
import types
from dataclasses import dataclass, field

import deepep
import torch
import torch.distributed as dist
from torch.nn import functional

from foremoe.integrations.megatron.virtual import FUNCTION, MODULE

# Letters: T tokens of a rank, K top-k, E experts, G ranks, B base slots, Y pairs that a rank serves.


@dataclass(slots=True)
class VirtualExpertPlan:
    """What a call of the planner returns."""

    virtual_experts: torch.Tensor
    experts_to_copy: torch.Tensor
    push_in_flight: bool = False
    started: set = field(default_factory=set)


@dataclass
class Workspace:
    """What the planner of all layers shares."""

    num_experts: int
    group: object


def plan_virtual_expert_routes(top_indices, workspace):
    """The stand-in of Megatron's planner: half of the pairs of each rank's first expert are served by the next rank."""
    assert top_indices.dim() == 2 and top_indices.dtype in (torch.int32, torch.int64)
    G, rank = workspace.group.size(), workspace.group.rank()
    tokens = gathered(torch.tensor([len(top_indices)]), workspace.group)
    assert (tokens == tokens[0]).all(), "every rank must route the same number of tokens"
    B = workspace.num_experts // G
    table_GB = torch.full((G, B), -1, dtype=torch.int32)
    virtual = top_indices // B * 2 * B + top_indices % B
    for g in range(G):
        to, moved = (g + 1) % G, (top_indices == g * B).cumsum(0) % 2 * (top_indices == g * B)
        if gathered(moved.sum().view(1), workspace.group).any():
            table_GB[to, 0] = g * B
            virtual = torch.where(moved > 0, to * 2 * B + B, virtual)
    plan_virtual_expert_routes.calls.append(rank)
    return VirtualExpertPlan(virtual.to(torch.int16), table_GB)


plan_virtual_expert_routes.calls = []


def install():
    """Megatron has virtual experts in this process from here on; returns their module."""
    deepep.install()
    deepep.HybridEPBuffer.equal = False  # how theirs pads is not known
    module = types.ModuleType(MODULE)
    vars(module).update({FUNCTION: plan_virtual_expert_routes, "VirtualExpertPlan": VirtualExpertPlan})
    sys.modules[MODULE] = module
    setattr(importlib.import_module(MODULE.rpartition(".")[0]), MODULE.rpartition(".")[2], module)
    plan_virtual_expert_routes.calls.clear()
    return module


def virtualize(layers, factor=1.0):
    """Gives MoE layers over HybridEP virtual experts; returns what managers saw: (table, runtime experts, experts) by call."""
    seen = []
    for moe in layers:
        dispatcher, config = moe.token_dispatcher, moe.config
        config.moe_virtual_expert_load_balance, config.moe_expert_rank_capacity_factor = True, factor
        config.use_transformer_engine_op_fuser = True
        manager = manager_class()(dispatcher.tp_ep_group, 2 * moe.num_local_experts, 2 * config.num_moe_experts, config)
        manager.experts, manager.seen = moe.experts, seen
        dispatcher._comm_manager = manager
        moe.experts.forward = manager.run_experts
    return seen


@functools.cache
def manager_class():
    """The manager, derived from that of the Megatron that is installed."""
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
    from megatron.core.transformer.moe.token_dispatcher import _HybridEPManager

    class VirtualManager(_HybridEPManager):
        """Plans where a layer is called, moves weights before the experts run and their gradients after."""

        _plan = None

        def plan_dispatch(self, top_indices):
            workspace = Workspace(self.num_experts // 2, self.group)
            self._plan = getattr(sys.modules[MODULE], FUNCTION)(top_indices, workspace)

        def setup_metadata(self, routing_map, probs):
            T, E, B = len(routing_map), self.num_experts // 2, self.num_local_experts // 2
            routing_TE, probs_TE = routing_map.reshape(T, E), probs.reshape(T, E)
            topk_TK = routing_TE.nonzero()[:, 1].view(T, -1)
            self.plan_dispatch(topk_TK)
            virtual_TK, table_GB = self._plan.virtual_experts, self._plan.experts_to_copy
            self.check(topk_TK, virtual_TK, table_GB, B)
            self.seen.append((table_GB.clone(), virtual_TK.clone(), topk_TK))
            runtime_TK = virtual_TK.long()
            routing = torch.zeros(T, 2 * E, dtype=torch.bool).scatter(1, runtime_TK, True)
            runtime_probs = probs_TE.new_zeros(T, 2 * E).scatter(1, runtime_TK, probs_TE.gather(1, topk_TK))
            super().setup_metadata(routing, runtime_probs)

        def check(self, topk_TK, virtual_TK, table_GB, B):
            """What the interface says of a plan."""
            assert virtual_TK.dtype == torch.int16 and virtual_TK.shape == topk_TK.shape
            assert table_GB.dtype == torch.int32 and table_GB.shape == (self.group.size(), B)
            everywhere = gathered(table_GB.reshape(1, -1), self.group)
            assert (everywhere == everywhere[0]).all(), "ranks have different tables"
            assert (decoded(virtual_TK, table_GB, B) == topk_TK).all(), "a pair goes to another expert"
            own_GB = torch.arange(self.group.size())[:, None].expand(-1, B)
            assert ((table_GB < 0) | (table_GB // B != own_GB)).all(), "a slot has an expert of its own rank"

        def run_experts(self, x_YH, num_S, probs_Y):
            experts, table_B = self.experts, self._plan.experts_to_copy[self.group.rank()]
            counts, B = num_S.tolist(), self.num_local_experts // 2
            self.check_room(counts)
            used = [expert >= 0 for expert in table_B.tolist()]
            assert used == [count > 0 for count in counts[B:]], "a slot gets tokens and no weights, or weights and no tokens"
            names = [name for name, _ in experts.local_experts[0].named_parameters()]
            params = [dict(expert.named_parameters())[name] for name in names for expert in experts.local_experts]
            slots = Push.apply(self._plan.experts_to_copy, self.group, *params)
            num = sum(counts)
            parts, outputs = zip(x_YH[:num].split(counts), probs_Y[:num].split(counts), strict=True), []
            for i, (x, probs) in enumerate(parts):
                if i < B:
                    outputs.append(experts.local_experts[i](x, probs)[0])
                else:
                    weights = {name: of[i - B] for name, of in zip(names, slots, strict=True)}
                    outputs.append(torch.func.functional_call(experts.local_experts[0], weights, (x, probs))[0])
            return functional.pad(torch.cat(outputs), (0, 0, 0, len(x_YH) - num)), None

        def check_room(self, counts):
            """A rank has as many places as its own pairs take, times the factor; an expert's pairs fill whole blocks."""
            alignment, own = get_align_size_for_quantization(self.config), self._plan.virtual_experts.numel()
            room = max(int(own * self.config.moe_expert_rank_capacity_factor), own + len(counts) * (alignment - 1))
            room += -room % alignment
            assert sum(-(-count // alignment) * alignment for count in counts) <= room, "the rank has no room for its pairs"

    return VirtualManager


class Push(torch.autograd.Function):
    """Weights of slots, one tensor [B, ...] per parameter of an expert; their gradients are added to the owners'."""

    @staticmethod
    def forward(ctx, table_GB, group, *params):
        G, B = table_GB.shape
        ctx.group, ctx.mine_B, ctx.num_experts = group, table_GB[group.rank()].long(), G * B
        own = [torch.stack(params[i : i + B]) for i in range(0, len(params), B)]
        used = (ctx.mine_B >= 0).view(B, *[1] * (own[0].dim() - 1))
        return tuple(gathered(of, group)[ctx.mine_B.clamp(min=0)] * used for of in own)

    @staticmethod
    def backward(ctx, *grads):
        first, B, out = ctx.group.rank() * len(ctx.mine_B), len(ctx.mine_B), []
        for grad in grads:
            whole = grad.new_zeros(ctx.num_experts, *grad.shape[1:])
            whole.index_add_(0, ctx.mine_B.clamp(min=0), grad * (ctx.mine_B >= 0).view(B, *[1] * (grad.dim() - 1)))
            dist.all_reduce(whole, group=ctx.group)
            out += whole[first : first + B].unbind(0)
        return None, None, *out


def decoded(virtual_TK, table_GB, B):
    """The expert that each pair of a rank meets; -2 where it meets none."""
    rank_TK, local_TK = virtual_TK.long() // (2 * B), virtual_TK.long() % (2 * B)
    slot_TK = table_GB.long()[rank_TK, (local_TK - B).clamp(min=0)]
    return torch.where(local_TK < B, rank_TK * B + local_TK, torch.where(slot_TK < 0, -2, slot_TK))


def gathered(rows, group):
    """Rows of all ranks, which have as many."""
    out = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
    return out
