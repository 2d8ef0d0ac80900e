"""The policy: a decoder-only transformer whose feed-forward layers are mixtures of experts, one dense layer before them.

The model itself works position by position. How positions attend to each other (whole sequences, or one new token against a
cache) and who computes experts (foremoe's runtime, or one process with all experts) is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from examples.grpo.favourites import Favourites
from examples.grpo.settings import Settings
from examples.grpo.task import MAX_ANSWER, MAX_PROMPT, NUM_TOKENS, task_of

# Letters: T tokens, L MoE layers, E experts, K top-k, H hidden size, D = 3H columns of queries, keys and values, V vocabulary;
# Q sequences, N positions, B groups of experts.

Attend = Callable[[int, torch.Tensor], torch.Tensor]  # (block, qkv_TD) -> [T, H]
Experts = Callable[
    [int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]  # (MoE layer, x_TH, topk_TK, weight_TK) -> [T, H]


class Block(nn.Module):
    """Attention and router (or dense MLP) of one layer."""

    def __init__(self, settings: Settings, dense: bool) -> None:
        super().__init__()
        hidden = settings.hidden_size
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.router = None if dense else nn.Linear(hidden, settings.num_experts, bias=False)
        wide = 4 * hidden
        mlp = [nn.Linear(hidden, wide, bias=False), nn.SiLU(), nn.Linear(wide, hidden, bias=False)]
        self.mlp = nn.Sequential(*mlp) if dense else nn.Sequential()


class Policy(nn.Module):
    """Everything but the experts; the same on all ranks."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.token = nn.Embedding(NUM_TOKENS, settings.hidden_size)
        self.instruction = nn.Embedding(NUM_TOKENS, settings.hidden_size)
        self.position = nn.Embedding(MAX_PROMPT + MAX_ANSWER, settings.hidden_size)
        self.blocks = nn.ModuleList(Block(settings, dense=i == 0) for i in range(1 + settings.num_layers))
        self.favourites = Favourites(settings)
        self.norm = nn.RMSNorm(settings.hidden_size)
        self.head = nn.Linear(settings.hidden_size, NUM_TOKENS, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.5)
        nn.init.normal_(self.instruction.weight, std=settings.instruction_std)

    def forward(
        self,
        token_T: torch.Tensor,
        instruction_T: torch.Tensor,
        position_T: torch.Tensor,
        attend: Attend,
        experts: Experts,
        replay_TLK: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the next token, and the experts chosen.

        Args:
            token_T: Tokens that are fed.
            position_T: Their positions.
            instruction_T: The first token of each token's sequence, which says what to do.
            replay_TLK: Experts to use; None lets the router choose. Their weights always come from the live router scores.

        Returns:
            logits_TV, and topk_TLK int64.
        """
        x_TH = self.token(token_T) + self.instruction(instruction_T) + self.position(position_T)
        topk_LTK: list[torch.Tensor] = []
        task_T = task_of(instruction_T)
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if block.router is None:
                x_TH = self._attend(i, x_TH, attend)
                x_TH = x_TH + block.mlp(block.ffn_norm(x_TH))
                continue
            replay_TK = None if replay_TLK is None else replay_TLK[:, len(topk_LTK)].long()
            layer = partial(self._layer, i, len(topk_LTK), task_T, replay_TK, attend, experts)
            again = self.settings.reforward and torch.is_grad_enabled()
            x_TH, topk_TK = checkpoint(layer, x_TH, use_reentrant=False) if again else layer(x_TH)
            topk_LTK.append(topk_TK)
        no_TLK = torch.zeros(len(x_TH), 0, self.settings.num_topk, dtype=torch.long)
        return self.head(self.norm(x_TH)), torch.stack(topk_LTK, dim=1) if topk_LTK else no_TLK

    def _attend(self, i: int, x_TH: torch.Tensor, attend: Attend) -> torch.Tensor:
        block = self.blocks[i]
        assert isinstance(block, Block)
        return x_TH + block.out(attend(i, block.qkv(block.attention_norm(x_TH))))

    def _layer(
        self, i: int, layer: int, task_T: torch.Tensor, replay_TK: torch.Tensor | None, attend: Attend, experts: Experts,
        x_TH: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """One MoE layer: its output, and the experts chosen."""
        block = self.blocks[i]
        assert isinstance(block, Block) and block.router is not None
        x_TH = self._attend(i, x_TH, attend)
        inner_TH = block.ffn_norm(x_TH)
        score_TE = block.router(inner_TH)
        topk_TK = self.choose(score_TE, self.favourites.bonus(layer, task_T)) if replay_TK is None else replay_TK
        # The softmax over all experts, scaled so that the chosen ones sum to 1, is the softmax over the chosen ones.
        weight_TK = score_TE.gather(1, topk_TK).softmax(dim=1)
        return x_TH + experts(layer, inner_TH, topk_TK, weight_TK), topk_TK

    def choose(self, score_TE: torch.Tensor, bonus_TB: torch.Tensor) -> torch.Tensor:
        """The best experts of the best group; a group is as good as its best expert and its bonus.

        Args:
            score_TE: Router scores.
            bonus_TB: Addition to the score of a group for a token.

        Returns:
            Experts of each token, int64 [T, K].
        """
        s = self.settings
        score_TE = score_TE.detach()
        by_group = score_TE.view(-1, s.num_groups, s.num_experts // s.num_groups)
        best_T1 = (by_group.amax(dim=2) + bonus_TB).argmax(dim=1, keepdim=True)
        allowed = torch.zeros(by_group.shape[:2], dtype=torch.bool).scatter_(1, best_T1, True)
        return by_group.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1).topk(s.num_topk, dim=1).indices


class WholeSequences:
    """Attention of tokens that form whole sequences, each token to itself and those before it.

    Args:
        valid_QN: True where a sequence has a token; its valid positions come first. Tokens are the valid ones in row order.
        keep: Called with (block, key_QNAC, value_QNAC); for a cache.
    """

    def __init__(
        self, valid_QN: torch.Tensor, num_heads: int, keep: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None
    ) -> None:
        self.valid_QN, self.num_heads, self.keep = valid_QN, num_heads, keep

    def __call__(self, block: int, qkv_TD: torch.Tensor) -> torch.Tensor:
        Q, N = self.valid_QN.shape
        if Q == 0:
            return qkv_TD[:, : qkv_TD.shape[1] // 3]
        padded = qkv_TD.new_zeros(Q, N, qkv_TD.shape[1])
        padded[self.valid_QN] = qkv_TD
        query, key, value = padded.view(Q, N, 3, self.num_heads, -1).unbind(2)
        if self.keep is not None:
            self.keep(block, key, value)
        # Padding lies behind the tokens, where the causal mask hides it.
        out = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return out.transpose(1, 2).reshape(Q, N, -1)[self.valid_QN]


def positions(valid_QN: torch.Tensor) -> torch.Tensor:
    """int64 [T]: place of every valid token in its sequence."""
    return torch.arange(valid_QN.shape[1]).expand(valid_QN.shape)[valid_QN]
