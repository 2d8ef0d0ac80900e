"""Level pack: several packings, each of them planned; the one whose stage is predicted to be fastest stays."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.base.parallel import for_rows
from foremoe.levels import PackSolver, RankSolver
from foremoe.machine.cluster import Cluster
from foremoe.problem.kernels.demand import add_rows
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.routing.trace import RoutingTrace
from foremoe.solvers.home.anneal import Anneal
from foremoe.solvers.home.price import price_L, row_seconds_L
from foremoe.solvers.pack.balanced_tokens import BalancedTokens, model_of, rank_tokens
from foremoe.solvers.pack.expert_aware import ExpertAware
from foremoe.solvers.pack.value import expert_pairs
from foremoe.solvers.search.search import Search
from foremoe.workload.dealing import require_counts, sum_cells
from foremoe.workload.packing import AsGiven

# Letters: M micro-steps, L layers, J layers of a sample, G ranks, E experts, Q sequences.


@dataclass(frozen=True, slots=True)
class BestPack(PackSolver):
    """Packs in several ways, plans every packing, and keeps the one whose stage the cost model predicts to be fastest.

    What replicas make of a packing no packer's own objective foresees whole: file order that keeps tasks together may be hard
    to balance without replicas and the fastest with them. So the packers' results are planned as they will be, in a sample of
    the layers, and their predicted seconds (an update stage, with the moves of homes) decide; of equal ones the first stays.
    Where experts do not divide over the ranks there is no plan; the objective of `ExpertAware` decides then. Holds tables of
    4 * Q * min(L, layers) * E and 8 * M * min(L, layers) * G * E bytes, plus those of the packers that run side by side.

    Attributes:
        packers: Packers to try; default: `ExpertAware` with and without replicas (with `redundant` 0 only without),
            `BalancedTokens` and `AsGiven`. They run side by side on the planner's threads.
        redundant: slots per rank for replicas.
        home: the home level that will follow, None: homes stay.
        rank: the solvers of the rank level that will follow.
        cluster: as in `ExpertAware`.
        ranks_per_node: as in `ExpertAware`.
        layers: largest number of layers that are planned; they stand for all.
    """

    packers: tuple[PackSolver, ...] = ()
    redundant: int = 1
    home: Anneal | None = None
    rank: tuple[RankSolver, ...] = (Search(effort=0),)
    cluster: str = "8xh100"
    ranks_per_node: int | None = None
    layers: int = 16

    def __post_init__(self) -> None:
        for name, kind, example in (("packers", PackSolver, "AsGiven()"), ("rank", RankSolver, "Search()")):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(solver, kind) for solver in value):
                raise InputError(f"BestPack needs {name} as a tuple of such solvers, like ({example},); got {value!r}.")
        if self.home is not None and not isinstance(self.home, Anneal):
            raise InputError(f"BestPack needs home as Anneal(...), whose moves have a price, or None; got {self.home!r}.")
        whole(self.redundant, "redundant of BestPack", 0, 10**6)
        whole(self.layers, "layers of BestPack", 1, 10**6)
        Cluster.preset(self.cluster, num_ranks=1, ranks_per_node=self.ranks_per_node)

    def solve(
        self, trace: RoutingTrace, *, num_ranks: int, tokens_per_rank: int, sample_group_Q: Array | None = None, seed: int = 0
    ) -> tuple[Array, Array]:
        """As `PackSolver.solve`; `seed` is that of all packers."""
        ways = self.ways()
        packings = [(np.empty(0), np.empty(0))] * len(ways)

        def pack(i: int, _: int) -> None:
            packings[i] = ways[i].solve(
                trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, sample_group_Q=sample_group_Q, seed=seed
            )

        for_rows(pack, len(ways), 1, whole=True)  # on the planner's threads
        return packings[int(np.argmin(self.seconds(trace, packings, num_ranks=num_ranks)))]

    def ways(self) -> tuple[PackSolver, ...]:
        """Returns the packers to try."""
        if self.packers:
            return self.packers
        alone = self._aware()
        aware = (dataclasses.replace(alone, skew_weight=0.1, redundant=self.redundant), alone) if self.redundant else (alone,)
        return (*aware, BalancedTokens(), AsGiven())

    def seconds(self, trace: RoutingTrace, packings: list[tuple[Array, Array]], *, num_ranks: int) -> list[float]:
        """Predicts the seconds, uncalibrated, of the planned stage under every packing ``(micro_step_Q, rank_Q)``."""
        if trace.num_experts % num_ranks:
            return [self._aware().objective(trace, *packing, num_ranks=num_ranks) for packing in packings]
        layer_J = np.unique(np.linspace(0, trace.L - 1, min(trace.L, self.layers)).round().astype(np.int64))
        pairs_QJE = expert_pairs(trace, layer_J)
        share = len(layer_J) / trace.L
        problems = (self._problem(trace, layer_J, pairs_QJE, *packing, num_ranks) for packing in packings)
        return [self._stage_seconds(problem) / share for problem in problems]

    def _aware(self) -> ExpertAware:
        return ExpertAware(skew_weight=1.0, redundant=0, cluster=self.cluster, ranks_per_node=self.ranks_per_node)

    def _problem(
        self, trace: RoutingTrace, layer_J: Array, pairs_QJE: Array, micro_step_Q: Array, rank_Q: Array, num_ranks: int
    ) -> Problem:
        """The update stage of a packing, in the sampled layers and with contiguous homes."""
        (Q, J, E), G, M = pairs_QJE.shape, num_ranks, int(micro_step_Q.max()) + 1
        require_counts((M, J, G, E), trace.num_bytes)
        load_MGJE = np.zeros((M, G, J, E), np.int32)
        add_rows(pairs_QJE.reshape(Q, -1), micro_step_Q * np.int64(G) + rank_Q, load_MGJE.reshape(M * G, -1))
        # A model that stands in for an unknown one has its sizes, not its experts.
        model = dataclasses.replace(model_of(trace), num_experts=E, num_topk=min(trace.K, E), num_expert_groups=1)
        return Problem(
            model=model, cluster=Cluster.preset(self.cluster, num_ranks=G, ranks_per_node=self.ranks_per_node),
            redundant=min(self.redundant, E), home_LE=np.tile(np.arange(E), (J, 1)), load_MLE=load_MGJE.sum(axis=1),
            load_MLGE=load_MGJE.transpose(0, 2, 1, 3), schedule=Schedule.accumulate(M),
            tokens_MG=rank_tokens(trace.seq_len_Q, micro_step_Q, rank_Q, G),
            attention_MG=sum_cells(micro_step_Q, rank_Q, G, trace.seq_len_Q.astype(np.float64) ** 2),
            moe_layer_L=trace.moe_layer_L[layer_J],
        )  # fmt: skip

    def _stage_seconds(self, problem: Problem) -> float:
        if self.home is None:
            return float(row_seconds_L(problem, problem.home_LE, self.rank, problem.M).sum())
        home_LE = self.home.solve(problem)
        moves_s = price_L(problem, home_LE, self.home.state_bytes).sum()
        return float(moves_s + row_seconds_L(problem, home_LE, self.rank, problem.M).sum())
