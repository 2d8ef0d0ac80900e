"""Static: homes only."""

from hypothesis import given
from solver_util import num_replicas_N, problems, require_valid

from foremoe.solvers.static import Static


@given(problem=problems())
def test_serves_everything_at_home(problem):
    placement = Static().solve(problem, problem.static())
    require_valid(problem, placement)
    assert (num_replicas_N(problem, placement) == 0).all()
    assert repr(Static()) == "Static()"
