"""MoELayers of Megatron-Core run by a plan, by hand: what an adapter has to do, in its shortest form.

After `route` nothing in a `MoELayer` cares whether it deals with logical experts or with physical slots. So a layer gets a second
dispatcher over all slots, `preprocess` maps experts to slots, and the experts compute with what the engine says the slots hold.
"""

import copy
import itertools
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.func import functional_call

from foremoe.runtime.remap import remap
from foremoe.schedule import Phase

# Letters: T tokens of a source, Z their (token, expert) pairs in token order, E experts, S slots of a rank, P slots of all ranks.


class MegatronBuffers:
    """Homes and main gradients where Megatron keeps them; slots beside the model.

    Args:
        layers: MoELayers whose parameters have a `main_grad`.   num_buffers: slot buffers to make.
    """

    def __init__(self, layers, num_buffers):
        self.layers, self.num_buffers = layers, num_buffers
        like = list(layers[0].experts.local_experts[0].parameters())
        self._slots = [[torch.zeros(p.numel(), dtype=p.dtype) for p in like] for _ in range(num_buffers)]
        self._slot_grads = [[torch.zeros(p.numel(), dtype=p.main_grad.dtype) for p in like] for _ in range(num_buffers)]

    def home(self, layer, expert):
        return [p.detach().view(-1) for p in self._parameters(layer, expert)]

    def slot(self, buffer):
        return self._slots[buffer]

    def main_grad(self, layer, expert):
        return [p.main_grad.view(-1) for p in self._parameters(layer, expert)]

    def slot_grad(self, buffer):
        return self._slot_grads[buffer]

    def _parameters(self, layer, expert):
        moe = self.layers[layer]
        return list(moe.experts.local_experts[expert - moe.local_expert_indices[0]].parameters())


class Planned:
    """Runs the layers of a model chunk by a plan, from construction to `end`.

    Args:
        engine: its buffers are those of the layers.   plan: one for all of them.
        split_MLP: what the plan gives to this source.

    Attributes:
        served: (micro-step, layer) -> pairs that every slot of this rank served in forward.   num_drift: unplanned pairs.
        timeline: the engine's, after `end`.
    """

    def __init__(self, layers, engine, plan, split_MLP):
        self.layers, self.engine, self.plan = layers, engine, plan
        self.split_MLP = torch.from_numpy(split_MLP.copy())
        self.expert_MLP = torch.from_numpy(plan.expert_MLGS.reshape(plan.M, plan.L, -1).copy())
        self.home_slot_LE = torch.from_numpy(plan.home_LE // plan.B * plan.S + plan.home_LE % plan.B)
        self.anchor = torch.zeros((), requires_grad=True)
        self.served, self.num_drift, self.timeline = {}, 0, None
        uses = plan.header.schedule.uses(plan.L)
        steps = plan.order_M[uses.micro_step_U]
        # A layer's n-th pass of a phase belongs to the n-th micro-step of the schedule in that phase.
        self._left = {
            (index, phase): iter(steps[(uses.layer_U == index) & (uses.phase_U == phase)].tolist())
            for index, phase in itertools.product(range(plan.L), Phase)
        }
        self._now = {}  # layer -> (micro-step, phase) under way
        self._own_dispatchers = [moe.token_dispatcher for moe in layers]
        engine.begin(plan)
        for index, moe in enumerate(layers):
            self._attach(index, moe)

    def end(self):
        """Brings the gradients home and puts the layers back."""
        self.timeline = self.engine.end()
        for moe, dispatcher in zip(self.layers, self._own_dispatchers, strict=True):
            moe.token_dispatcher = dispatcher
            del moe.preprocess, moe.experts.forward

    def _attach(self, index, moe):
        rank, num_slots = self.engine.group.rank, self.plan.S
        config = copy.copy(moe.config)  # dataclasses.replace would check and derive everything again
        config.num_moe_experts = self.plan.G * num_slots
        slots = list(range(rank * num_slots, (rank + 1) * num_slots))
        moe.token_dispatcher = MoEAlltoAllTokenDispatcher(num_slots, slots, config, get_default_pg_collection())
        own_preprocess = moe.preprocess
        moe.preprocess = lambda hidden, probs, routing: own_preprocess(hidden, *self._to_slots(index, probs, routing))
        moe.experts.forward = lambda tokens, counts, probs: (self._compute(index, tokens, counts, probs), None)

    def _to_slots(self, layer, probs_TE, routing_TE):
        """Probabilities and routing over physical slots."""
        # Only checkpointing runs a layer forward inside backward.
        phase = Phase.FORWARD if torch._C._current_graph_task_id() == -1 else Phase.BACKWARD
        m = next(self._left[layer, phase])
        self._now[layer] = m, phase
        # Before dispatch: tokens would have to go home if a replica were missing on any rank.
        assert self.engine.weights(m, layer, phase).complete
        token_Z, expert_Z = routing_TE.nonzero(as_tuple=True)
        slot_Z1, num_drift = remap(
            expert_Z[:, None], self.split_MLP[m, layer], self.expert_MLP[m, layer], self.home_slot_LE[layer]
        )
        self.num_drift += int(num_drift) if phase == Phase.FORWARD else 0
        at = token_Z, slot_Z1[:, 0]
        routing_TP = routing_TE.new_zeros(len(routing_TE), self.plan.G * self.plan.S).index_put(at, routing_TE.new_ones(()))
        probs_TP = probs_TE.new_zeros(routing_TP.shape).index_put(at, probs_TE[token_Z, expert_Z])
        return probs_TP, routing_TP

    def _compute(self, layer, tokens, num_S, probs):
        m, phase = self._now[layer]
        if phase == Phase.FORWARD:
            self.served[m, layer] = num_S.tolist()
        row = Row(self, m, layer, phase, num_S.tolist())
        output = SlotExperts.apply(tokens, probs, self.anchor, row)
        if phase == Phase.FORWARD:
            self.engine.release(m, layer, phase)
        return output


@dataclass(frozen=True, slots=True)
class Row:
    """What `SlotExperts` keeps instead of weights."""

    planned: Planned
    micro_step: int
    layer: int
    phase: Phase
    num_S: list[int]

    def weights(self, phase):
        return self.planned.engine.weights(self.micro_step, self.layer, phase)


class SlotExperts(torch.autograd.Function):
    """The experts of one rank on the weights of its slots.

    Saves its input and the row, never weights: a slot may hold another expert before backward. `anchor` puts it into the graph
    of a rank on which nothing else wants a gradient, because backward is collective.
    """

    @staticmethod
    def forward(ctx, tokens, probs, anchor, row):
        ctx.row = row
        ctx.save_for_backward(tokens, probs)
        expert = row.planned.layers[row.layer].experts.local_experts[0]
        found = row.weights(row.phase)
        parts = zip(tokens.split(row.num_S), probs.split(row.num_S), found.weights_S, strict=True)
        return torch.cat([run(expert, *part) if len(part[0]) else part[0] for part in parts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        row, engine = ctx.row, ctx.row.planned.engine
        expert = row.planned.layers[row.layer].experts.local_experts[0]
        found = row.weights(Phase.BACKWARD)
        tokens, probs = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        grad_tokens, grad_probs = torch.zeros_like(tokens), torch.zeros_like(probs)
        begin = 0
        for num, weights, sums in zip(row.num_S, found.weights_S, found.grads_S, strict=True):
            here = slice(begin, begin + num)
            begin += num
            if not num:
                continue
            inputs = [x.detach()[here].requires_grad_() for x in (tokens, probs)]
            inputs += [x.detach().requires_grad_() for x in weights]
            with torch.enable_grad():
                output = run(expert, *inputs[:2], inputs[2:])
            grad_tokens[here], grad_probs[here], *grads = torch.autograd.grad(output, inputs, grad_output[here])
            for total, grad in zip(sums, grads, strict=True):
                total += grad
        engine.gradients(row.micro_step, row.layer)
        engine.release(row.micro_step, row.layer, Phase.BACKWARD)
        return grad_tokens, grad_probs, None, None


def run(expert, tokens, probs, weights):
    """A home expert as a template, on flat weights of another one."""
    named = {name: x.view(p.shape) for (name, p), x in zip(expert.named_parameters(), weights, strict=True)}
    output, bias = functional_call(expert, named, (tokens, probs))
    assert bias is None
    return output
