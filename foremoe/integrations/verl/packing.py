"""Packing, which uses the rank loads of experts to choose the samples that share a micro-batch.

veRL's own split of a mini-batch considers only lengths. Packing starts from this split and exchanges samples between
micro-batches of the same data-parallel rank. Samples stay on their rank and in their optimizer step. A rank keeps its number of
micro-batches and their token limit. No micro-batch gets more attention work than the largest one had before.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from foremoe.base.errors import InputError
from foremoe.distributed.group import TorchGroup
from foremoe.integrations.megatron.layout import model_of, moe_numbers
from foremoe.integrations.once import warn_once
from foremoe.routing.readers.counting import count_micro_steps
from foremoe.solvers import ExpertAware
from foremoe.solvers.pack.repack import UNIT, repack

_logger = logging.getLogger(__name__)

# Letters: Q samples (or groups of samples that veRL keeps together), M micro-batches, J layers of a sample of layers, E experts,
# D data-parallel ranks, G ranks of the EP group, C counts of a sample: one for each of J layers and G home ranks.

# Number of sampled layers, which represent all layers. Every rank searches for the whole EP group.
_LAYERS = 8


class Packer:
    """Object that regroups samples into micro-batches. Each engine has its own packer.

    Args:
        engine: veRL engine that has been initialized.

    Raises:
        InputError: Planning cannot estimate times for the sizes of the model.
    """

    def __init__(self, engine: Any) -> None:
        from megatron.core import parallel_state as ps

        self._engine, self._model, self._numbers = engine, model_of(engine.tf_config, 2.0), moe_numbers(engine.tf_config)
        self._num_experts, self._ep_size = self._model.num_experts, ps.get_expert_model_parallel_world_size()
        self._ep_first = min(_ranks(ps.get_expert_model_parallel_group()))

    def meet(self, group_timeout_s: float) -> None:
        """Creates the groups of ranks that pack together. Collective over all ranks of these groups.

        Args:
            group_timeout_s: Timeout in seconds for an answer from another rank.
        """
        from megatron.core import parallel_state as ps

        self._data = TorchGroup(self._engine.get_data_parallel_group(), timeout_s=group_timeout_s)
        # Groups of ranks that hold the same samples.
        self._alike = [
            TorchGroup(group, timeout_s=group_timeout_s)
            for group in (ps.get_tensor_and_context_parallel_group(), ps.get_pipeline_model_parallel_group())
            if group.size() > 1
        ]

    def repack_batches(self, data: Any, micro_batches: list[Any], indices: Any) -> tuple[list[Any], Any]:
        """Returns micro-batches and their samples' indices. Both are veRL's own if its split has a fixed size or packing fails.

        Collective.
        """
        from verl.utils import tensordict_utils as tu

        if indices is None:
            warn_once(
                _logger,
                "foremoe leaves veRL's micro-batches as they are: packing=true needs micro-batches of dynamic size; set "
                "actor.use_dynamic_bsz=True (for recompute: rollout.log_prob_use_dynamic_bsz=True) or packing=false.",
            )
            return micro_batches, indices
        fault, mine = "", None
        try:
            mine = self._samples(data, indices)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        answers = self._data.gather((fault, mine))
        fault = next((other for other, _ in answers if other), "")
        split: list[list[int]] = []
        if not fault:
            try:
                split = _split(answers, self._data.rank)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
        # All ranks that hold the same samples must form the same micro-batches.
        found = (fault, zlib.crc32(repr(split).encode()))
        for group in self._alike:
            others = group.gather(found)
            if any(other != others[0] or other[0] for other in others):
                found = (next((why for why, _ in others if why), "ranks with the same samples disagree"), 0)
        if found[0]:
            if self._data.rank == 0 or not fault:  # one data-parallel rank logs faults that all of them know
                _logger.warning("veRL's micro-batches stay as they are: %s", found[0])
            return micro_batches, indices
        return [tu.index_select_tensor_dict(data, samples) for samples in split], split

    def close(self) -> None:
        """Releases the groups."""
        for group in (self._data, *self._alike):
            group.close()

    def _samples(self, data: Any, indices: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Returns this rank's samples as integers, so that all ranks that read them find the same split."""
        from verl.utils import tensordict_utils as tu

        together = int(tu.get_non_tensor_data(data, key="force_group_size", default=1))
        limit = int(data["max_token_len_per_gpu"]) * int(tu.get_non_tensor_data(data, key="sp_size", default=1))
        len_S = data["input_ids"].offsets().diff().cpu().numpy().astype(np.int64)
        len_QT = len_S.reshape(-1, together)
        model, num_layers = self._model, len(self._numbers)
        layers = self._layers(data["routed_experts"].shape[2])
        pair_flops = ExpertAware().skew_weight * model.flops_per_pair * num_layers / len(layers)
        flops_S = np.asarray(model.attention_flops(len_S.astype(np.float64), len_S.astype(np.float64) ** 2))
        attention_Q = np.rint(flops_S * (num_layers * UNIT / pair_flops)).astype(np.int64).reshape(-1, together).sum(axis=1)
        # The last token of a sample has no routing.
        rows = [routes[:-1, layers].cpu() for routes in data["routed_experts"].unbind()]
        pairs_SJE = count_micro_steps(rows, self._num_experts)
        pairs_SJG = pairs_SJE.reshape(*pairs_SJE.shape[:2], self._ep_size, -1).sum(axis=3, dtype=np.int32)
        micro_step_S = np.empty(len(len_S), np.int64)
        for m, samples in enumerate(indices):
            micro_step_S[list(samples)] = m
        return {
            "ep": self._ep_first, "together": together, "limit": limit, "M": len(indices), "len_Q": len_QT.sum(axis=1),
            "attention_Q": attention_Q, "micro_step_Q": micro_step_S.reshape(-1, together)[:, 0],
            "pairs_QC": pairs_SJG.reshape(len(len_QT), together, -1).sum(axis=1, dtype=np.int32), "G": self._ep_size,
        }  # fmt: skip

    def _layers(self, num_given: int) -> list[int]:
        """Returns the positions of sampled MoE layers of the whole model among the layers with given routing."""
        numbers = self._numbers
        at = list(range(len(numbers))) if num_given == len(numbers) else numbers
        chosen = np.unique(np.linspace(0, len(at) - 1, min(len(at), _LAYERS)).round().astype(int))
        return [at[i] for i in chosen]


def _ranks(group: Any) -> list[int]:
    import torch.distributed as dist

    return dist.get_process_group_ranks(group)


def _split(answers: Sequence[tuple[str, Any]], rank: int) -> list[list[int]]:
    """Returns the samples of each of this rank's micro-batches, from the answers of all data-parallel ranks.

    Raises:
        InputError: The splits of this EP group's ranks do not have the same form.
    """
    mine = answers[rank][1]
    # Ranks of other EP groups do not share any layer with these.
    parts = [(d, part) for d, (_, part) in enumerate(answers) if part["ep"] == mine["ep"]]
    # Compiled code uses these as indices without checking bounds.
    for name, what in (("M", "micro-batches"), ("together", "samples per group"), ("G", "ranks per EP group")):
        found = [part[name] for _, part in parts]
        if min(found) != max(found):
            raise InputError(f"data-parallel ranks have {min(found)} to {max(found)} {what}; packing needs the same on all.")
    cat = lambda name: np.concatenate([part[name] for _, part in parts])  # noqa: E731
    rank_Q = np.repeat(np.arange(len(parts)), [len(part["len_Q"]) for _, part in parts])
    limit_D = np.array([part["limit"] for _, part in parts])
    micro_step_Q, pairs_QJG = cat("micro_step_Q"), cat("pairs_QC").reshape(len(rank_Q), -1, mine["G"])
    repack(cat("len_Q"), cat("attention_Q"), pairs_QJG, rank_Q, limit_D, mine["M"], micro_step_Q)
    of_mine_Q = micro_step_Q[rank_Q == [d for d, _ in parts].index(rank)]
    k = mine["together"]
    return [[int(q) * k + i for q in np.flatnonzero(of_mine_Q == m) for i in range(k)] for m in range(mine["M"])]
