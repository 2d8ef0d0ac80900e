"""Names and texts that become planners."""

from __future__ import annotations

import subprocess
import sys

import pytest

import foremoe
import foremoe.solvers
from foremoe.base.errors import InputError
from foremoe.planner import parsing
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES, resolve
from foremoe.problem.foresight import Noisy
from foremoe.solvers import Chain, Exact, Greedy, Lpt, Quota


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_repr_of_a_strategy_is_its_text(name):
    assert foremoe.parse(repr(STRATEGIES[name])) == STRATEGIES[name]


@pytest.mark.parametrize(
    "value",
    [
        *(
            t()
            for t in (getattr(foremoe.solvers, n) for n in foremoe.solvers.__all__)
            if not getattr(t, "__abstractmethods__", None)
        ),
        Noisy(0.25, seed=3),
        foremoe.SharedSlots(5),
        foremoe.ResidentSlots(copies=2),
        foremoe.CostModel(objective="balance", overlap=0.5),
        Planner(rank=(Quota(min_pairs=7), Exact(node_limit=3)), foresight=Noisy(0.1), guard=False),
    ],
    ids=repr,
)
def test_parse_inverts_repr(value):
    assert foremoe.parse(repr(value)) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Unknown()", "is unknown"),
        ("Quota(nonsense=1)", "cannot be made"),
        ("Quota(min_pairs=__import__('os'))", "is unknown"),
        ("Quota(", "not of the form"),
        ("Quota(**{})", "write the options out"),
        ("1 + 1", None),
        ("[].append", "not of the form"),
    ],
)
def test_nothing_else_is_evaluated(text, says):
    if says is None:
        with pytest.raises(InputError):
            resolve(text)
    else:
        with pytest.raises(InputError, match=says):
            foremoe.parse(text)


def test_a_text_of_unknown_origin_loads_no_entry_point(monkeypatch):
    loaded = []
    monkeypatch.setattr(parsing, "entry_point_names", lambda group: ["theirs"])
    monkeypatch.setattr(parsing, "load_entry_point", lambda group, name: loaded.append(name))
    with pytest.raises(InputError, match="is unknown"):
        parsing.parse("Planner(rank=(Theirs(),))", builtin=True)
    assert loaded == [] and parsing.parse("Quota(min_pairs=9)", builtin=True) == Quota(min_pairs=9)
    with pytest.raises(InputError, match="is unknown"):
        parsing.parse("Theirs()")
    assert loaded == ["theirs"]


def test_resolve_takes_names_texts_places_and_objects():
    assert resolve("quota") is STRATEGIES["quota"]
    assert resolve("Quota(min_pairs=9)").rank == (Quota(min_pairs=9),)
    assert resolve("foremoe.solvers:Greedy").rank == (Greedy(),)
    assert resolve(Lpt()).home == Lpt()
    assert resolve(Chain()).rank == (Chain(),)
    assert resolve(Planner()) == Planner()
    with pytest.raises(InputError, match="choose from static"):
        resolve("fastest")
    with pytest.raises(InputError, match="cannot use solver"):
        resolve("no_such_package:RankSolver")


def test_importing_foremoe_is_light():
    code = "import sys, foremoe; print(sorted({'numba', 'torch', 'numpy', 'cupy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    code = "import sys, foremoe; foremoe.Planner; foremoe.STRATEGIES; foremoe.compare; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_names_are_functions_even_after_their_modules_are_imported():
    code = "import foremoe.planner.parsing, foremoe; print(callable(foremoe.compare), callable(foremoe.parse))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True True"
