"""Built-in solvers, with one algorithm per file, grouped by the level that they solve.

==========  =====================================================================
pack        `AsGiven`, `BalancedTokens`, `ExpertAware`
home        `Keep`, `Anneal`
node, rank  `Eplb`, `Laer`, `Lplb`, `Quota`, `LeastLoaded`, `Greedy`, `Feplb`, `Echo`,
            `MoonEp`, `Search`, `Robust`, `Exact`
split       `Even`, `ExactSplit`
path        `Deadline`
==========  =====================================================================
"""

from foremoe.levels import HomeSolver, PackSolver, PathSolver, RankSolver, SplitSolver
from foremoe.solvers.base import RowSolver
from foremoe.solvers.exact.exact import Exact
from foremoe.solvers.greedy import Greedy
from foremoe.solvers.home.anneal import Anneal
from foremoe.solvers.home.keep import Keep
from foremoe.solvers.pack.balanced_tokens import BalancedTokens
from foremoe.solvers.pack.expert_aware import ExpertAware
from foremoe.solvers.path.deadline import Deadline
from foremoe.solvers.published.echo import Echo
from foremoe.solvers.published.eplb import Eplb
from foremoe.solvers.published.feplb import Feplb
from foremoe.solvers.published.laer import Laer
from foremoe.solvers.published.least_loaded import LeastLoaded
from foremoe.solvers.published.lplb import Lplb
from foremoe.solvers.published.moon_ep import MoonEp
from foremoe.solvers.published.quota import Quota
from foremoe.solvers.robust.robust import Robust
from foremoe.solvers.search.search import Search
from foremoe.solvers.split.even import Even
from foremoe.solvers.split.exact import ExactSplit
from foremoe.workload.packing import AsGiven

__all__ = [
    "Anneal", "AsGiven", "BalancedTokens", "Deadline", "Echo", "Eplb", "Even", "Exact",
    "ExactSplit", "ExpertAware", "Feplb", "Greedy", "HomeSolver", "Keep", "Laer", "LeastLoaded", "Lplb", "MoonEp",
    "PackSolver", "PathSolver", "Quota", "RankSolver",
    "Robust", "RowSolver", "Search", "SplitSolver",
]  # fmt: skip
