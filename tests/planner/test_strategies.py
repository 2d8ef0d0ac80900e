"""Names and texts that become planners."""

from __future__ import annotations

import subprocess
import sys

import pytest

import foremoe
import foremoe.solvers
from foremoe.base.errors import InputError
from foremoe.base.extensions import load_entry_point
from foremoe.planner.parsing import parse
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES, resolve
from foremoe.problem.foresight import Noisy, Rerouted
from foremoe.solvers import Anneal, Exact, Greedy, Quota, Search


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
        Rerouted(0.25, "redraw", seed=3),
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
        ("Quota(min_pair=4)", r"unexpected keyword argument 'min_pair'; did you mean 'min_pairs'\?$"),
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


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Two other packages with solvers; the second breaks on import."""
    (tmp_path / "theirs.py").write_text(
        "import dataclasses\nfrom foremoe.solvers import Greedy\n"
        "@dataclasses.dataclass(frozen=True)\nclass Deep(Greedy):\n    depth: int = 1\n"
        "wide = Deep(depth=7)\n"
        "def edit(load_E, node_G, num_base, options, expert_GS, quota_GS):\n    pass\n"
    )
    (tmp_path / "broken.py").write_text("raise RuntimeError('half installed')\n")
    points = {"theirs": "their-deep = theirs:Deep\nwide = theirs:wide", "broken": "broken = broken:Broken"}
    for package, lines in points.items():
        metadata = tmp_path / f"{package}-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(f"[foremoe.solvers]\n{lines}\n")
    monkeypatch.syspath_prepend(tmp_path)
    load_entry_point.cache_clear()
    yield
    load_entry_point.cache_clear()
    for name in ("theirs", "broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("their-deep", 1),
        ("their-deep(depth=2)", 2),
        ("their-deep()", 1),
        ("Deep(depth=3)", 3),
        ("wide", 7),
        ("wide(depth=4)", 4),
        ("theirs:Deep", 1),
        ("theirs:Deep(depth=5)", 5),
        ("theirs:wide", 7),
        ("Planner(rank=(theirs:Deep(depth=6),), guard=False)", 6),
    ],
)
def test_texts_of_other_packages_take_options_and_load_only_what_they_name(installed, text, depth):
    (solver,) = resolve(text).rank
    assert type(solver).__name__ == "Deep" and solver.depth == depth
    assert "broken" not in sys.modules


def test_a_broken_package_breaks_its_own_texts_alone(installed):
    assert resolve("Quota(min_pairs=3)").rank == (Quota(min_pairs=3),)
    with pytest.raises(InputError, match=r"Nowhere in .* is unknown"):
        parse("Nowhere()")
    assert "theirs" not in sys.modules
    with pytest.raises(InputError, match="half installed"):
        resolve("broken(depth=1)")
    with pytest.raises(InputError, match="takes no options"):
        resolve("theirs:edit(3)")
    with pytest.raises(InputError, match="has an @"):
        parse("theirs @ Deep()")


@pytest.mark.parametrize("text", ["Deep()", "their-deep()", "theirs:Deep()", "Planner(rank=(theirs:Deep(),))"])
def test_a_text_of_unknown_origin_loads_nothing(installed, text):
    with pytest.raises(InputError):
        parse(text, builtin=True)
    assert "theirs" not in sys.modules and parse("Quota(min_pairs=9)", builtin=True) == Quota(min_pairs=9)


def test_resolve_takes_names_texts_places_and_objects():
    assert resolve("quota") is STRATEGIES["quota"]
    assert resolve("Quota(min_pairs=9)").rank == (Quota(min_pairs=9),)
    assert resolve("foremoe.solvers:Greedy").rank == (Greedy(),)
    assert resolve(Anneal()).home == Anneal()
    assert resolve(Search()).rank == (Search(),)
    assert resolve(Planner()) == Planner()
    with pytest.raises(InputError, match="choose from static"):
        resolve("fastest")
    with pytest.raises(InputError, match="cannot use solver"):
        resolve("no_such_package:RankSolver")


def test_a_place_in_a_module_is_told_from_a_strategy():
    with pytest.raises(InputError, match="is written 'mine:Halve'"):
        resolve("mine.Halve")


def test_names_are_functions_even_after_their_modules_are_imported():
    code = "import foremoe.planner.parsing, foremoe; print(callable(foremoe.compare), callable(foremoe.parse))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True True"
