"""Solvers: one algorithm per file, by level.

==========  =====================================================================
pack        `AsGiven`, `BalancedTokens`, `BestPack`, `ExpertAware`, `Permute`
home        `Keep`, `Lpt`, `Anneal`
node, rank  `Static`, `Eplb`, `Lplb`, `Quota`, `LeastLoaded`, `Greedy`, `NodeChain`, `Chain`, `Exact`
split       `Even`, `WaterFill`, `ExactSplit`
order       `Transitions`
path        `Deadline`
==========  =====================================================================
"""

from foremoe.solvers.anneal import Anneal
from foremoe.solvers.as_given import AsGiven
from foremoe.solvers.balanced_tokens import BalancedTokens
from foremoe.solvers.base import HomeSolver, OrderSolver, PackSolver, PathSolver, RowSolver, Solver, SplitSolver
from foremoe.solvers.best_pack import BestPack
from foremoe.solvers.chain import Chain
from foremoe.solvers.deadline import Deadline
from foremoe.solvers.eplb import Eplb
from foremoe.solvers.even import Even
from foremoe.solvers.exact import Exact
from foremoe.solvers.exact_split import ExactSplit
from foremoe.solvers.expert_aware import ExpertAware
from foremoe.solvers.greedy import Greedy
from foremoe.solvers.keep import Keep
from foremoe.solvers.least_loaded import LeastLoaded
from foremoe.solvers.lplb import Lplb
from foremoe.solvers.lpt import Lpt
from foremoe.solvers.node import NodeChain
from foremoe.solvers.permute import Permute
from foremoe.solvers.quota import Quota
from foremoe.solvers.static import Static
from foremoe.solvers.transitions import Transitions
from foremoe.solvers.water_fill import WaterFill

__all__ = [
    "Anneal", "AsGiven", "BalancedTokens", "BestPack", "Chain", "Deadline", "Eplb", "Even", "Exact", "ExactSplit", "ExpertAware",
    "Greedy", "HomeSolver", "Keep", "LeastLoaded", "Lplb", "Lpt", "NodeChain", "OrderSolver", "PackSolver", "PathSolver",
    "Permute", "Quota", "RowSolver", "Solver", "SplitSolver", "Static", "Transitions", "WaterFill",
]  # fmt: skip
