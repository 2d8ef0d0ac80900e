"""What is broken on purpose, to see whether the comparisons notice. Each is a context around a planned run, on a rank."""

import contextlib
from unittest.mock import patch

import torch

from foremoe.integrations.megatron.buffers import ParamSync
from foremoe.integrations.megatron.replicas import _Keys
from foremoe.integrations.megatron.stage import MegatronStage
from foremoe.transfer.returns import Returns


def nothing():
    """The same patching, and nothing is broken."""
    return _routed(lambda stage, m, layer, routing_TE, routing_TP: routing_TP)


def everything_at_home():
    """Quotas are not met: replicas get nothing. The right experts compute all the same."""
    return _routed(lambda stage, m, layer, routing_TE, routing_TP: stage.route_home(layer, routing_TE))


def one_pair_elsewhere():
    """A pair of a replica goes home instead: two slots of an expert serve one more and one less."""

    def moved(stage, m, layer, routing_TE, routing_TP):
        home_TP = stage.route_home(layer, routing_TE)
        away = (routing_TP & ~home_TP).nonzero()
        if not len(away):
            return routing_TP
        token, slot = away[0].tolist()
        expert = int(stage._plan.expert_MLGS[m, layer].flat[slot])
        changed = routing_TP.clone()
        changed[token, slot] = False
        changed[token, stage._home_slot_LE[layer, expert]] = True
        return changed

    return _routed(moved)


def wrong_expert():
    """A replica's pairs go to the slot beside it."""

    def moved(stage, m, layer, routing_TE, routing_TP):
        at_home = stage.route_home(layer, routing_TE).any(0) | torch.from_numpy(stage._plan.expert_MLGS[m, layer].reshape(-1) < 0)
        changed = routing_TP.clone()
        for slot in (~at_home).nonzero()[:, 0].tolist():
            if not routing_TP[:, slot - 1].any():
                changed[:, slot - 1], changed[:, slot] = routing_TP[:, slot], False
        return changed

    return _routed(moved)


def swapped_micro_steps():
    """Tokens of the first two micro-steps go by each other's placement and quotas."""
    routed = MegatronStage.route
    return patch.object(
        MegatronStage, "route", lambda self, m, layer, routing_TE: routed(self, m ^ 1 if m < 2 else m, layer, routing_TE)
    )


def swapped_uses():
    """The first two micro-steps ask for each other's weights."""
    use = MegatronStage.use

    def swapped(self, layer, in_backward):
        m, phase = use(self, layer, in_backward)
        return (m ^ 1 if m < 2 else m), phase

    return patch.object(MegatronStage, "use", swapped)


def lost_return():
    """The gradient of one replica does not reach its home."""
    return _returned(lambda added: added[1:])


def double_return():
    """The gradient of one replica is added at home twice."""
    return _returned(lambda added: [added[0], *added])


def kept_weights():
    """Backward takes what lies in the slot where forward found its weights."""
    return patch.object(_Keys, "pack", lambda self, saved: saved)


def unfinished_gather():
    """Homes are read before data-parallel ranks have shared them (`overlap_param_gather`)."""
    return patch.object(ParamSync, "finish", lambda self, param: None)


def late_returns():
    """Gradients of replicas may come home after their parameter was reduced (`overlap_grad_reduce`)."""
    return patch.object(ParamSync, "reduces_now", lambda self, param: False)


def _routed(change):
    routed = MegatronStage.route

    def changed(self, m, layer, routing_TE):
        routing_TP, num_drift = routed(self, m, layer, routing_TE)
        return change(self, m, layer, routing_TE, routing_TP), num_drift

    return patch.object(MegatronStage, "route", changed)


@contextlib.contextmanager
def _returned(change):
    """Changes what a rank adds to its homes, the first time that it gets something from replicas."""
    settle, done = Returns._settle_oldest, []

    def changed(self):
        sent = self._under_way[0]
        if sent.added and not done:
            done.append(True)
            sent.added = change(sent.added)
        settle(self)

    with patch.object(Returns, "_settle_oldest", changed):
        yield


BREAKAGES = {
    breakage.__name__: breakage
    for breakage in (
        nothing, everything_at_home, one_pair_elsewhere, wrong_expert, swapped_micro_steps, swapped_uses, lost_return,
        double_return, kept_weights, unfinished_gather, late_returns,
    )
}  # fmt: skip
