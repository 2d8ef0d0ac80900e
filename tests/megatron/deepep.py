"""DeepEP's buffers over torch.distributed, for machines without GPUs; no part of foremoe.

Written from DeepEP's documented interface (docstrings of `Buffer` and of `HybridEPBuffer`, branch hybrid-ep at 94a9f8f6): what is
sent where, what comes back, shapes and dtypes. Megatron's own managers and autograd functions run on top, unmodified. The real
kernels take 16-bit tokens only; these take float32 too.
"""

import importlib
import sys
import types

import torch
import torch.distributed as dist

# Letters: T tokens of this rank, U tokens that a rank received, K top-k, E experts of all ranks, G ranks, Y pairs.


def install():
    """Megatron finds DeepEP in this process from here on; buffers of an earlier program are dropped."""
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    if not fused_a2a.HAVE_DEEP_EP:
        package, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
        package.Buffer, package.HybridEPBuffer, package.utils = Buffer, HybridEPBuffer, utils
        utils.EventHandle, utils.EventOverlap = EventHandle, EventOverlap
        sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
        importlib.reload(fused_a2a)
        for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch", "hybrid_ep_combine"):
            setattr(token_dispatcher, name, getattr(fused_a2a, name))
    fused_a2a._buffer = fused_a2a._hybrid_ep_buffer = None
    HybridEPBuffer.equal = True


class EventHandle:
    """A CUDA event."""


class EventOverlap:
    """An event to wait for; everything here is done when it returns."""

    def __init__(self, event=None):
        self.event = event

    def current_stream_wait(self):
        pass


class Config:
    """Sizes of buffers, which are not needed here."""

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Buffer:
    """DeepEP's high-throughput dispatch and combine: a token goes once to each rank that has one of its experts."""

    num_sms = 20

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):  # fmt: skip
        """Tokens per rank, per RDMA rank, per expert; is_token_in_rank [T, G]; event. -1 in `topk_idx` selects nothing."""
        G = self.group.size()
        assert topk_idx.dtype == torch.int64 and topk_idx.dim() == 2 and num_experts % G == 0
        assert topk_idx.numel() == 0 or (int(topk_idx.min()) >= -1 and int(topk_idx.max()) < num_experts)
        in_expert_TE = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.int32).scatter_add_(
            1, topk_idx % (num_experts + 1), torch.ones_like(topk_idx, dtype=torch.int32)
        )[:, :num_experts]
        in_rank_TG = in_expert_TE.view(len(topk_idx), G, -1).any(2)
        return in_rank_TG.sum(0).int(), None, in_expert_TE.sum(0).int(), in_rank_TG, EventOverlap()

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        """(x [U, H], topk_idx [U, K] of local experts, -1 elsewhere, topk_weights [U, K], counts [E / G], handle, event);
        with a handle: x alone, along the same ways."""
        assert x.dim() == 2 and x.is_contiguous()
        if handle is not None:
            assert topk_idx is None and topk_weights is None and len(x) == handle[3]
            return self._send(x, handle), None, None, None, None, EventOverlap()
        assert topk_weights.dtype == torch.float32 and topk_idx.shape == topk_weights.shape and len(topk_idx) == len(x)
        G, rank = self.group.size(), self.group.rank()
        token_of = [is_token_in_rank[:, g].nonzero()[:, 0] for g in range(G)]
        sent = [len(tokens) for tokens in token_of]
        assert sent == num_tokens_per_rank.tolist()
        received = torch.empty(G, dtype=torch.int64)
        dist.all_to_all_single(received, torch.tensor(sent), group=self.group)
        handle = torch.cat(token_of), sent, received.tolist(), len(x)
        idx, weights = self._send(topk_idx, handle), self._send(topk_weights, handle)
        num_local = len(num_tokens_per_expert) // G
        local = idx - rank * num_local
        here = (idx >= 0) & (local >= 0) & (local < num_local)
        idx, weights = local.where(here, -1), weights.where(here, 0.0)
        counts = torch.bincount(idx[here], minlength=num_local).tolist()
        return self._send(x, handle), idx, weights, counts, handle, EventOverlap()

    def combine(
        self, x, handle, topk_weights=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):  # fmt: skip
        """Sums over the ranks where a token was, in float32: (x [T, H], topk_weights [T, K] or None, event)."""
        assert x.is_contiguous() and (topk_weights is None or topk_weights.dtype == torch.float32)
        summed = [None if part is None else self._send_back(part, handle) for part in (x, topk_weights)]
        return *summed, EventOverlap()

    def _send(self, rows, handle):
        tokens, sent, received, _ = handle
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows[tokens].contiguous(), received, sent, group=self.group)
        return out

    def _send_back(self, rows, handle):
        tokens, sent, received, num_tokens = handle
        assert len(rows) == sum(received)
        back = rows.new_empty(sum(sent), *rows.shape[1:])
        dist.all_to_all_single(back, rows.contiguous(), sent, received, group=self.group)
        out = torch.zeros(num_tokens, *rows.shape[1:], dtype=torch.promote_types(rows.dtype, torch.float32))
        return out.index_add_(0, tokens, back.to(out.dtype)).to(rows.dtype)


class HybridEPBuffer:
    """HybridEP's dispatch and combine: tokens come sorted by local expert, one row for each pair.

    Attributes:
        equal: Whether ranks must have as many tokens as each other, as the real one takes for granted when it gathers their maps.
    """

    equal = True

    def __init__(
        self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8=False, num_sms_dispatch_api=None,
        num_sms_combine_api=None, num_sms_preprocessing_api=None, num_blocks_permute=None, num_blocks_unpermute=None,
    ):  # fmt: skip
        sizes = (num_sms_dispatch_api, num_sms_combine_api, num_sms_preprocessing_api, num_blocks_permute, num_blocks_unpermute)
        assert all(size is None or (type(size) is int and size > 0) for size in sizes) and not use_fp8
        assert max_num_of_tokens_per_rank >= 0
        self.group = group
        self._check(hidden_dim, num_local_experts)

    def _check(self, hidden_dim, num_local_experts):
        """`is_valid` of HybridEP's config, with all ranks in one NVLink domain."""
        assert hidden_dim % 16 == 0 and num_local_experts * self.group.size() % 4 == 0, "The config is not valid."

    def dispatch_with_permute(
        self, *, hidden, routing_map=None, probs=None, scaling_factor=None, num_of_experts_per_rank=None, pad_multiple=None,
        num_permuted_tokens=None, non_blocking=False, handle=None, fuse_permute_dispatch=False,
    ):  # fmt: skip
        """(hidden [Y, H], probs [Y] or None, None, tokens per local expert, handle); with a handle, along the same ways.

        With `pad_multiple` an expert's rows fill whole blocks; with `num_permuted_tokens` there are as many rows, and the last of
        them may mean nothing.
        """
        assert scaling_factor is None
        assert not non_blocking or num_permuted_tokens >= 0, "The num_permuted_tokens is required for non-blocking mode."
        G, rank = self.group.size(), self.group.rank()
        if handle is None:
            assert routing_map.dtype == torch.bool and probs.dtype == torch.float32 and len(hidden) == len(routing_map)
            self._check(hidden.shape[1], num_of_experts_per_rank)
            assert routing_map.shape[1] == num_of_experts_per_rank * G
            lengths = self._lengths(routing_map)
            assert not self.equal or len(set(lengths)) == 1, f"ranks have {lengths} tokens"
            first = rank * num_of_experts_per_rank
            local = self._gather(routing_map)[:, first : first + num_of_experts_per_rank]
            expert_Y, token_Y = local.t().nonzero().unbind(1)
            block, counts = pad_multiple or 1, local.sum(0)
            filled = -(-counts // block) * block
            before = (filled.cumsum(0) - filled) - (counts.cumsum(0) - counts)  # rows that blocks have left empty so far
            row_Y = torch.arange(len(token_Y)) + before[expert_Y]
            overflow_flag = torch.zeros(1, dtype=torch.int32)
            handle = token_Y, expert_Y + first, row_Y, filled, routing_map.shape, lengths, overflow_flag
        token_Y, expert_Y, row_Y, filled, shape, _, _ = handle
        num_filled = int(filled.sum())
        num_rows = num_filled if num_permuted_tokens is None else int(num_permuted_tokens)
        assert len(hidden) == shape[0] and num_filled <= num_rows, "pairs would be dropped"

        def placed(rows_Y):
            rows = rows_Y.new_zeros(num_rows, *rows_Y.shape[1:])
            rows[num_filled:] = torch.nan
            return rows.index_copy(0, row_Y, rows_Y)

        out = None if probs is None else placed(self._gather(probs)[token_Y, expert_Y])
        return placed(self._gather(hidden)[token_Y]), out, None, filled, handle

    def combine_with_unpermute(self, *, hidden, probs=None, handle=None, pad_multiple=None, fuse_unpermute_combine=False):
        """Sums over the experts of a token, in float32: (hidden [T, H], probs [T, E] or None)."""
        token_Y, expert_Y, row_Y, _, (T, E), lengths, _ = handle
        hidden, probs = hidden[row_Y], None if probs is None else probs[row_Y]
        first, num_tokens = sum(lengths[: self.group.rank()]), sum(lengths)
        mine = slice(first, first + T)

        def reduced(out):
            dist.all_reduce(out, group=self.group)
            return out[mine]

        wide = torch.promote_types(hidden.dtype, torch.float32)
        out = torch.zeros(num_tokens, hidden.shape[1], dtype=wide).index_add_(0, token_Y, hidden.to(wide))
        weights = None
        if probs is not None:
            weights = reduced(torch.zeros(num_tokens, E).index_put_((token_Y, expert_Y), probs))
        return reduced(out).to(hidden.dtype), weights

    def _lengths(self, rows):
        """Rows of every rank."""
        lengths = torch.empty(self.group.size(), dtype=torch.int64)
        dist.all_gather_into_tensor(lengths, torch.tensor([len(rows)]), group=self.group)
        return lengths.tolist()

    def _gather(self, rows):
        """Rows of all ranks."""
        lengths = self._lengths(rows)
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
        out = rows.new_empty(len(lengths) * len(padded), *rows.shape[1:])
        as_bytes = (lambda x: x.view(torch.uint8)) if rows.dtype == torch.bool else (lambda x: x)
        dist.all_gather_into_tensor(as_bytes(out), as_bytes(padded), group=self.group)
        return torch.cat([part[:length] for part, length in zip(out.split(len(padded)), lengths, strict=True)])
