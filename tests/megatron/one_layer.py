"""A model of one MoE layer; no part of foremoe."""

import torch


class OneLayer(torch.nn.Module):
    """A model of one MoE layer, as Megatron-Core's look from outside."""

    def __init__(self, moe):
        super().__init__()
        self.config = moe.config
        layer = torch.nn.Module()
        layer.mlp = moe
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])

    def forward(self, x):
        return self.decoder.layers[0].mlp(x)[0]
