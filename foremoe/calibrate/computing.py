"""Measures a rank's compute in a layer and micro-step, for experts alone and for layers whose experts return their input."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.calibrate.case import FEW_PAIRS, NUM_LAYERS, SHARES, Case
from foremoe.calibrate.layer import Layer, PassThrough, PlainLayer
from foremoe.calibrate.points import Point
from foremoe.calibrate.routing import Routing
from foremoe.calibrate.stopwatch import Lap, Stopwatch
from foremoe.distributed.group import Group
from foremoe.machine.cluster import Cluster
from foremoe.plan.plan import Plan
from foremoe.planner.strategies import resolve
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase
from foremoe.runtime.bank import ExpertBank
from foremoe.runtime.experts import ComputeTime, GroupedExperts, Row, SwiGLU
from foremoe.runtime.runtime import Runtime
from foremoe.runtime.stage import HomeStage
from foremoe.workload.workload import Workload

# Letters: T tokens of a rank, K top-k, H hidden size, M micro-steps, L layers, G ranks, P physical slots.

_MICRO_STEPS = 2  # the second one is timed, when memory is warm
_TRIED_PAIRS = 64
_TIMEOUT_S = 120.0


class ExpertCompute:
    """Grouped expert compute of this rank, which calls the runtime's own function."""

    def __init__(self, group: Group, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        self.group, self.case = group, case
        self.bank = ExpertBank(
            num_layers=NUM_LAYERS, num_experts=case.num_experts, hidden_size=case.model.hidden_size, ffn_size=case.model.ffn_size,
            rank=group.rank, num_ranks=group.size, dtype=dtype, device=device, math=(case.math or SwiGLU)(), seed=case.seed,
        )  # fmt: skip
        self.stage = HomeStage(self.bank)

    def inputs(self, num_S: Sequence[int]) -> torch.Tensor:
        """Returns random inputs for the pairs that the rank receives, sorted by slot."""
        return torch.randn(sum(num_S), self.case.model.hidden_size, dtype=self.bank.dtype, device=self.bank.device)

    def row(self, num_S: list[int], layer: int = 0) -> Row:
        """Returns the `row` for `forward`, with everything that a layer of the runtime prepares before it runs the experts."""
        return Row.of(self.bank, self.stage, ComputeTime(), 0, layer, num_S)

    def forward(self, x_YH: torch.Tensor, row: Row) -> torch.Tensor:
        """Returns the outputs of one layer's experts."""
        return GroupedExperts.apply(x_YH, row, Phase.FORWARD)

    def flops_per_s(self, watch: Stopwatch) -> float:
        """Measures the FLOP/s of a rank. Uses few pairs, because the machine may be slow."""
        busy = min(2, self.bank.num_base)
        num_S = [_TRIED_PAIRS] * busy + [0] * (self.bank.num_base - busy)
        x_YH, row = self.inputs(num_S), self.row(num_S)
        seconds = watch.second(lambda: self.forward(x_YH.detach().requires_grad_(True), row).backward(x_YH))
        return 3.0 * sum(num_S) * self.case.model.flops_per_pair / seconds

    def points(self, watch: Stopwatch, budget_s: float) -> list[Point]:
        """Measures few pairs in all or some slots, all pairs in two slots, and loads of random routing.

        With few pairs, reading weights takes most of the time.
        """
        G, per_rank = self.group.size, self.bank.num_base
        two = min(2, per_rank)
        even = [*itertools.product(FEW_PAIRS, sorted({per_rank, -(-per_rank // 4)}))]
        even.append((self.case.tokens * self.case.model.num_topk // two, two))
        loads = [(0, [[num] * busy + [0] * (per_rank - busy)] * G) for num, busy in even]
        for share, heavy in itertools.product(SHARES, (False, True)):
            tokens = max(8, int(self.case.tokens * share))
            routing = draw_routing(self.case, tokens, heavy)
            loads.append((tokens, [routing.busy(g) for g in range(G)]))
        out: list[Point] = []
        for tokens, num_GS in loads:
            num_S = num_GS[self.group.rank]
            x_YH, rows = self.inputs(num_S), [self.row(num_S, layer) for layer in range(NUM_LAYERS)]

            def run(lap: Lap, rows: list[Row] = rows, x_YH: torch.Tensor = x_YH) -> None:
                found = [self.forward(x_YH.detach().requires_grad_(True), row) for row in rows]
                lap()
                for y_YH in reversed(found):
                    y_YH.backward(x_YH)
                lap()

            most = max(num_GS, key=sum)
            for backward, (seconds, spread) in enumerate(watch.laps(run, budget_s / len(loads))):
                out.append(
                    Point(kind="experts", seconds=seconds, spread=spread, backward=bool(backward), tokens=NUM_LAYERS * tokens,
                          pairs=NUM_LAYERS * sum(most), busy=NUM_LAYERS * sum(num > 0 for num in most), calls=NUM_LAYERS)
                )  # fmt: skip
        return out


class Layers:
    """Whole layers on this rank, which the runtime runs both without a plan and with a plan that has no replicas."""

    def __init__(self, group: Group, case: Case, dtype: torch.dtype, device: torch.device, node_of_rank: Sequence[int]) -> None:
        self.group, self.case, self.device, self.dtype, self.node_of_rank = group, case, device, dtype, tuple(node_of_rank)
        torch.manual_seed(case.seed)
        make = case.layer or PlainLayer
        self.layers: list[Layer] = [make(case.model, case.num_experts, dtype, device) for _ in range(NUM_LAYERS)]
        bank = ExpertBank(
            num_layers=NUM_LAYERS, num_experts=case.num_experts, hidden_size=1, ffn_size=1, rank=group.rank, num_ranks=group.size,
            num_buffers=3, dtype=dtype, device=device, math=PassThrough(),
        )  # fmt: skip
        self.runtime = Runtime(bank, group=group, timeout_s=_TIMEOUT_S)

    def points(self, watch: Stopwatch, budget_s: float) -> list[Point]:
        """Measures several numbers of tokens with even and with heavy routing. Runs at home and with a plan take turns."""
        cases = list(itertools.product(SHARES, (False, True)))
        return [p for share, heavy in cases for p in self._at(watch, share, heavy, budget_s / len(cases))]

    def _at(self, watch: Stopwatch, share: float, heavy: bool, budget_s: float) -> list[Point]:
        case, model, length = self.case, self.case.model, self.case.sequence_length
        tokens = max(length, int(case.tokens * share) // length * length)
        routing = draw_routing(case, tokens, heavy)
        plan, split_MLP = static_plan(case, routing, tokens, self.group.rank)
        topk_TK = torch.from_numpy(routing.topk_GTK[self.group.rank]).to(self.device)
        x_TH = torch.randn(tokens, model.hidden_size, dtype=self.dtype, device=self.device)

        def stage(lap: Lap, begin: Any) -> None:
            begin()
            for m in range(_MICRO_STEPS):
                timed = lap if m == _MICRO_STEPS - 1 else lambda: None
                self.group.barrier()
                timed()
                y_TH = self._forward(x_TH.detach().requires_grad_(True), topk_TK)
                timed()
                y_TH.backward(x_TH)
                timed()
            self.runtime.end()

        def run(lap: Lap) -> None:
            stage(lap, self.runtime.begin_home)
            stage(lap, lambda: self.runtime.begin(plan, split_MLP))

        across = len(set(self.node_of_rank)) > 1
        row_bytes = 2 * NUM_LAYERS * model.hidden_size * x_TH.element_size()  # to the experts and back
        work: dict[str, Any] = {
            "layers": NUM_LAYERS, "tokens": NUM_LAYERS * tokens, "moved": NUM_LAYERS * routing.largest,
            "exchanges": 2 * NUM_LAYERS if self.group.size > 1 else 0,
            "attention_flops": NUM_LAYERS * float(model.attention_flops(tokens, tokens * length)),
            "exchange_bytes": row_bytes * routing.off_rank(self.node_of_rank, across),
        }  # fmt: skip
        found = watch.laps(run, budget_s)
        where = [("layer", False, found[1]), ("layer", True, found[2]), ("planned", False, found[4]), ("planned", True, found[5])]
        return [Point(kind=kind, backward=back, seconds=s, spread=spread, **work) for kind, back, (s, spread) in where]

    def _forward(self, x_TH: torch.Tensor, topk_TK: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x_TH, inner_TH, score_TE = layer(x_TH, self.case.sequence_length)
            weight_TK = score_TE.gather(1, topk_TK).softmax(dim=1)
            x_TH = x_TH + self.runtime.moe(number, inner_TH, topk_TK, weight_TK)
        return x_TH


def draw_routing(case: Case, tokens: int, heavy: bool) -> Routing:
    """Draws random routing of `tokens` tokens on every rank."""
    return Routing.draw(tokens, case.num_ranks, case.num_experts, case.model.num_topk, heavy=heavy, seed=case.seed)


def static_plan(case: Case, routing: Routing, tokens: int, rank: int) -> tuple[Plan, Array]:
    """Returns a plan with a spare slot and without replicas, and a rank's split. All layers of the plan have this routing."""
    G, E = routing.load_GE.shape
    load_MLGE = np.broadcast_to(routing.load_GE, (_MICRO_STEPS, NUM_LAYERS, G, E))
    work = Workload.from_counts(load_MLGE, num_topk=case.model.num_topk, tokens_MG=np.full((_MICRO_STEPS, G), tokens))
    any_cluster = Cluster.preset("8xh100", num_ranks=G)
    sizes = {"num_layers": NUM_LAYERS, "num_experts": E, "num_expert_groups": 1}
    model = type(case.model).from_dict(case.model.to_dict() | sizes)
    # Without replicas, the objective has no effect, and this one compiles the fewest kernels.
    problem = Problem.of(work, any_cluster, model=model, cost=CostModel(objective="balance"))
    plan, _ = resolve("static").plan(problem, num_threads=1)
    return plan, plan.rows_for(work, rank)
