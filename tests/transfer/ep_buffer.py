"""A stand-in for DeepEP's ``EPBuffer`` with its calls for redundant experts, between threads; no part of foremoe.

Written from DeepEP 2.5's docstrings (``deep_ep/buffers/ep.py``, commit 13b3abaa) and from what its host code and its tests assert
(``tests/ep``, commits 1a1ffbac and def86514): it refuses what they refuse.
"""

import torch

ALIGNMENT = 32  # bytes, `deep_ep.get_num_tma_alignment()`


class Event:
    """What a call returns; `wait` comes once."""

    def __init__(self, work):
        self._work = work

    def wait(self):
        self._work()
        self._work = None


class EPBuffer:
    """One rank of an NVLink domain.

    Args:
        group: of the domain's ranks.

    Attributes:
        calls: number of calls, by name.
    """

    def __init__(self, group):
        self.group, self._region, self.calls = group, [], {"lb_prefetch_weights": 0, "lb_reduce_grads": 0}

    def allocate(self, shape, dtype):
        """Memory of the region that peers reach."""
        self._region.append(torch.zeros(shape, dtype=dtype))
        return self._region[-1]

    def lb_prefetch_weights(self, redundant_expert_weights, expert_weights, redundancy_mapping, num_sms=0, previous_event=None):
        self.calls["lb_prefetch_weights"] += 1
        assert redundant_expert_weights and len(redundant_expert_weights) == len(expert_weights)
        for slots, homes in zip(redundant_expert_weights, expert_weights, strict=True):
            self._check(slots, homes, redundancy_mapping, num_sms)
        arrived = []
        for homes in expert_weights:
            whole = torch.cat(self.group.gather(homes.clone()))
            arrived.append(whole)

        def land():
            for slots, whole in zip(redundant_expert_weights, arrived, strict=True):
                for s, expert in enumerate(redundancy_mapping[self.group.rank].tolist()):
                    if expert >= 0:
                        slots[s].copy_(whole[expert].view(slots[s].shape))

        self.group.barrier()
        return Event(land)

    def lb_reduce_grads(self, redundant_expert_grads, expert_grads, redundancy_mapping, num_sms=0, previous_event=None):
        self.calls["lb_reduce_grads"] += 1
        self._check(redundant_expert_grads, expert_grads, redundancy_mapping, num_sms)
        assert redundant_expert_grads.dim() == expert_grads.dim() == 2
        assert redundant_expert_grads.dtype == expert_grads.dtype == torch.float32
        everywhere, B = self.group.gather(redundant_expert_grads.clone()), len(expert_grads)
        for g, slots in enumerate(everywhere):
            for s, expert in enumerate(redundancy_mapping[g].tolist()):
                if expert // B == self.group.rank and expert >= 0:
                    expert_grads[expert % B] += slots[s]
        self.group.barrier()
        return Event(lambda: None)

    def _check(self, slots, homes, mapping, num_sms):
        assert num_sms >= 0 and num_sms % 2 == 0
        assert slots.is_contiguous() and homes.is_contiguous() and homes.dim() >= 1 and len(homes) > 0
        assert any(slots.untyped_storage().data_ptr() == of.untyped_storage().data_ptr() for of in self._region)
        num_bytes = homes[0].nbytes
        assert slots[0].nbytes == num_bytes and num_bytes % ALIGNMENT == 0
        assert mapping.dtype == torch.int32 and mapping.is_contiguous() and mapping.shape == (self.group.size, len(slots))
        assert int(mapping.min()) >= -1 and int(mapping.max()) < self.group.size * len(homes)
        assert all(torch.equal(mapping, other) for other in self.group.gather(mapping.clone())), "ranks have different tables"
        own = mapping // len(homes) == torch.arange(self.group.size)[:, None]
        assert not (own & (mapping >= 0)).any(), "a rank hosts a redundant instance of its own expert"
