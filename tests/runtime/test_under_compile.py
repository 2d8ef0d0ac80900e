"""A model that calls a layer may be compiled: the layer itself runs as written, and what is around it is compiled."""

from __future__ import annotations

import torch
from runtime_util import draw_topk

from foremoe.distributed.group import ThreadGroup
from foremoe.runtime import ExpertBank, Runtime

# Letters: T tokens, K top-k, H hidden size.


def test_a_compiled_model_gets_the_same_outputs_and_gradients() -> None:
    bank = ExpertBank(num_layers=1, num_experts=4, hidden_size=8, ffn_size=8)
    runtime, graphs = Runtime(bank, group=ThreadGroup.of(1)[0]), []

    def model(x_TH: torch.Tensor, topk_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        return runtime.moe(0, x_TH.sin(), topk_TK, weight_TK).cos() + x_TH

    def backend(graph: torch.fx.GraphModule, example: object) -> torch.fx.GraphModule:
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    found = []
    for run in (model, torch.compile(model, backend=backend)):
        generator = torch.Generator().manual_seed(0)
        x_TH, weight_TK = (torch.randn(6, size, generator=generator).requires_grad_() for size in (8, 2))
        runtime.begin_home()
        y_TH = run(x_TH, draw_topk(6, 2, 4, generator), weight_TK)
        y_TH.sum().backward()
        runtime.end()
        found.append([y_TH, x_TH.grad, weight_TK.grad, *(param.grad.clone() for param in bank.parameters())])
        bank.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert [len(graph) for graph in graphs] == [1, 2]
