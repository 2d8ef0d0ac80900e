"""Options that make no sense are refused by every solver, with the option named."""

import pytest

from bench.taot import Taot
from foremoe.base.errors import InputError
from foremoe.solvers import Anneal, Eplb, Exact, ExpertAware, Feplb, Laer, LeastLoaded, Quota, Robust, Search

NAN, INF = float("nan"), float("inf")
REFUSED = {
    Anneal: [
        {"sweeps": -1}, {"sweeps": 1.5}, {"min_gain": NAN}, {"move_price": INF}, {"state_bytes": -1.0}, {"seed": 0.5},
    ],
    Eplb: [{"num_groups": 0}],
    Exact: [{"node_limit": 0}, {"node_limit": 2.5}, {"time_limit_s": 0.0}],
    ExpertAware: [{"skew_weight": 1.5}, {"redundant": -1}, {"sweeps": -1}, {"cluster": "nothing"}],
    Feplb: [{"dyn": -1}, {"dyn": 1.5}, {"dyn": True}],
    Laer: [{"tries": -1}, {"seed": -1}, {"tries": 0.5}],
    LeastLoaded: [{"alpha": 0.9}, {"alpha": NAN}, {"alpha": INF}, {"min_pairs": -1}, {"threshold": -1}],
    Quota: [{"min_pairs": -1}, {"min_pairs": 1.5}],
    Robust: [{"spread": -0.1}, {"noise": -1.0}, {"samples": 0}, {"spread": "wide"}],
    Search: [{"effort": -1}, {"effort": 1.5}, {"effort": True}, {"effort": "8"}],
    Taot: [{"epsilon": 0.0}, {"epsilon": NAN}, {"rounds": 0}],
}  # fmt: skip


@pytest.mark.parametrize(("solver", "options"), [(solver, options) for solver, cases in REFUSED.items() for options in cases])
def test_bad_options_are_refused(solver, options):
    ((name, value),) = options.items()
    with pytest.raises(InputError, match="nothing" if value == "nothing" else name):
        solver(**options)
