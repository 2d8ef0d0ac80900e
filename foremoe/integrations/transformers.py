"""Recording of the routing of Hugging Face models while they generate or score text, without a rollout engine::

    with foremoe.integrations.transformers.record(model) as recorded:
        model.generate(**inputs, max_new_tokens=512)
    recorded.trace().save("rollout.npz")

Hooks record the outputs of the routers. This module does not import transformers itself. It is tested with transformers 5.24. In
version 5.0, DeepSeek-V3 has no router that can be recorded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.machine.model import Model
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.routed_experts import from_routed_experts

__all__ = ["Recording", "record"]

# Letters: B sequences of a batch, S their tokens in one pass, L MoE layers, K top-k.


@contextlib.contextmanager
def record(model: Any) -> Iterator[Recording]:
    """Records the routing of every forward pass of `model` inside the block.

    A pass that continues a key-value cache, as in `generate`, belongs to the batch whose first pass filled the cache.
    `attention_mask` marks padding. If a sequence ends before other sequences of its batch, it is cut after its first
    end-of-sequence token. The last sampled token has no routing, because no pass has read this token.

    Args:
        model: A causal language model whose MoE blocks have a router (`gate` or `router`) next to their `experts`, such as
            Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Mixtral, DeepSeek-V2 and V3, GLM-4.5, gpt-oss and OLMoE.

    Raises:
        InputError: The model has no such router, a pass has an attention mask with more than two axes, or a pass continues a
            cache that was filled outside the block.

    Example:
        >>> with foremoe.integrations.transformers.record(model) as recorded:  # doctest: +SKIP
        ...     _ = model.generate(**inputs, max_new_tokens=64)
        >>> recorded.trace().save("rollout.npz")  # doctest: +SKIP
    """
    recording = Recording(model)
    handles = [
        recording._decoder.register_forward_pre_hook(recording._begin, with_kwargs=True),
        recording._decoder.register_forward_hook(recording._end),
        *(router.register_forward_hook(recording._routed) for router in recording._routers),
    ]
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()


class Recording:
    """The routing that `record` has recorded."""

    def __init__(self, model: Any) -> None:
        found, within = dict[int, Any](), ""
        for name, module in model.named_modules():
            children = dict(module.named_children())
            router = children.get("gate", children.get("router"))
            number = re.search(r"(^|\.)layers\.(\d+)\.", f"{name}.")
            if "experts" in children and hasattr(router, "num_experts") and number:
                found[int(number[2])], within = router, name[: number.start()]
        experts = {int(router.num_experts) for router in found.values()}
        if len(experts) != 1:
            kind = f"{type(model).__name__} has {len(found)} routers" + (f" of {sorted(experts)} experts" if experts else "")
            raise InputError(f"{kind}, but one in each MoE layer is needed; give an MoE model of a newer transformers.")
        self._layers, self._num_experts = sorted(found), experts.pop()
        self._routers = [found[number] for number in self._layers]
        self._decoder = model.get_submodule(within)
        name = str(getattr(model.config, "_name_or_path", "") or model.config.model_type)
        self._name = Model.preset_of(name) or name
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self._ends = [] if ends is None else list(np.atleast_1d(ends))
        self._batches: list[_Batch] = []
        self._pass: dict[int, Any] | None = None  # chosen experts of the current pass, by router
        self._given: tuple[Any, Any, int, int] = (None, None, 0, 0)

    def trace(self, lengths: Sequence[int] | None = None) -> RoutingTrace:
        """Returns a trace of all recorded sequences, batch by batch, in the order of recording.

        Args:
            lengths: Number of tokens of each sequence. Defaults to the number of tokens that the model has read. Any further
                tokens have no routing.

        Raises:
            InputError: Nothing was recorded, or `lengths` does not match the recording.
        """
        payloads = [ids_TLK for batch in self._batches for ids_TLK in batch.sequences(self._ends)]
        if not payloads:
            raise InputError("no forward pass was recorded; call the model, or its generate, inside the block.")
        trace, _ = from_routed_experts(
            payloads, model=self._name, num_experts=self._num_experts, moe_layer_L=self._layers, lengths=lengths,
            source="transformers",
        )  # fmt: skip
        return trace

    def _begin(self, _: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids, mask, cache = (options.get(name) for name in ("input_ids", "attention_mask", "cache"))
        cache = options.get("past_key_values") if cache is None else cache  # its name up to 5.23
        ids = args[0] if args and ids is None else ids
        if mask is not None and getattr(mask, "ndim", 0) != 2:
            told = "padding can only be read from an attention_mask of two axes"
            raise InputError(f"{told}; give such a mask, and no static cache, while routing is recorded.")
        if cache is not None:
            cache.reorder_cache = _refuse_beams
        given = options["inputs_embeds"] if ids is None else ids
        self._given, self._pass = (ids, mask, len(given), 0 if cache is None else int(cache.get_seq_length())), {}

    def _routed(self, router: Any, _: Any, output: Any) -> None:
        if self._pass is None:
            return  # recomputed for a backward pass
        chosen = [x for x in output if hasattr(x, "dtype") and not x.is_floating_point()] if isinstance(output, tuple) else []
        if len(chosen) != 1 or chosen[0].ndim != 2:
            raise InputError(f"{type(router).__name__} does not return the chosen experts; use a newer transformers.")
        self._pass[id(router)] = chosen[0].detach()

    def _end(self, *_: Any) -> None:
        import torch

        (ids, mask, B, past), chosen, self._pass = self._given, self._pass, None
        if not chosen or len(chosen) < len(self._routers):
            raise InputError(f"a pass used {len(chosen or ())} of {len(self._routers)} routers; record passes of whole models.")
        # One copy to the host for all layers, on whatever devices they are.
        device = next(iter(chosen.values())).device
        ids_TLK = torch.stack([chosen[id(router)].to(device) for router in self._routers], dim=1).to("cpu", torch.int32).numpy()
        if past == 0:
            self._batches.append(_Batch())
        elif not self._batches:
            raise InputError("a pass continues a cache that was filled before; fill it while routing is recorded.")
        tokens_BS, mask_BS = (None if x is None else x.detach().cpu().numpy() for x in (ids, mask))
        self._batches[-1].add(past, ids_TLK.reshape(B, -1, *ids_TLK.shape[1:]), tokens_BS, mask_BS)


def _refuse_beams(*_: Any, **__: Any) -> None:
    raise InputError("beam search exchanges sequences while they are recorded; generate with num_beams=1.")


class _Batch:
    """Passes over one batch of sequences."""

    def __init__(self) -> None:
        self.ids: list[Array] = []  # [B, S, L, K] of each pass
        self.tokens: list[Array] = []  # [B, S] of each pass; empty if the model received embeddings
        self.mask_BS: Array | None = None
        self.num_prompt = 0

    def add(self, past: int, ids_BSLK: Array, tokens_BS: Array | None, mask_BS: Array | None) -> None:
        have = sum(ids.shape[1] for ids in self.ids)
        if past > have or (self.ids and len(ids_BSLK) != len(self.ids[0])):
            what = f"{len(ids_BSLK)} sequences from token {past} on, after {have} tokens of {len(self.ids[0]) if self.ids else 0}"
            raise InputError(f"a pass reads {what}; record whole batches, from their first pass on.")
        if past < have:  # drafted tokens that were not accepted
            self.ids = [np.concatenate(self.ids, axis=1)[:, :past]]
            self.tokens = [np.concatenate(self.tokens, axis=1)[:, :past]] if self.tokens else []
        self.num_prompt = self.num_prompt or int(ids_BSLK.shape[1])
        self.ids.append(ids_BSLK)
        self.tokens += [] if tokens_BS is None else [tokens_BS]
        self.mask_BS = self.mask_BS if mask_BS is None else mask_BS

    def sequences(self, ends: list[int]) -> list[Array]:
        """Returns the experts of each sequence, int32 [T, L, K], without padding before and after it."""
        ids_BSLK = np.concatenate(self.ids, axis=1)
        kept_BS = np.ones(ids_BSLK.shape[:2], bool)
        if self.mask_BS is not None:
            kept_BS[:, : self.mask_BS.shape[1]] &= self.mask_BS[:, : len(kept_BS[0])] > 0
        if self.tokens:
            ended_BS = np.isin(np.concatenate(self.tokens, axis=1), ends)
            ended_BS[:, : self.num_prompt] = False  # a prompt may contain finished turns
            kept_BS &= np.cumsum(ended_BS, axis=1) - ended_BS == 0
        return [ids_BSLK[b, kept_S] for b, kept_S in enumerate(kept_BS) if kept_S.any()]
