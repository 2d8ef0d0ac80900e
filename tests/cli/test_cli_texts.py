"""How the command line reads texts: numbers, lists, ranges, and ``--json`` with its optional file."""

from __future__ import annotations

import json
import math

import click
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foremoe.base.errors import InputError
from foremoe.cli.jsonio import _with_value, plain
from foremoe.cli.texts import Seconds, foresight_of, layer_range, planner_of, split_list, whole_numbers
from foremoe.problem.cost import CostModel
from foremoe.problem.foresight import Noisy, Rerouted

NAME = st.text("abcxyz_-0123456789.", min_size=1, max_size=6)
CALL = st.builds(
    lambda name, inner: f"{name}({inner})",
    NAME,
    st.text("ab=,1 [](){}'\"", max_size=0) | st.sampled_from(["a=1, b=2", "(1, [2, 3]),", "x='a,b'", 'y="(,"']),
)


@given(st.lists(NAME | CALL, min_size=1, max_size=6, unique=True))
def test_only_commas_outside_brackets_and_quotes_separate(items: list[str]) -> None:
    assert split_list((",".join(items),), "--planners") == items
    assert split_list(tuple(items), "--planners") == items


def test_a_repeated_list_option_is_one_list_without_repeats() -> None:
    assert split_list(("a,b", "b , c"), "--planners") == ["a", "b", "c"]


@pytest.mark.parametrize("text", ["", "a,,b", "a,", "f(1", "f)1(", "f('a)", "a,(b"])
def test_a_broken_list_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--planners"):
        split_list((text,), "--planners")


@pytest.mark.parametrize("text", ["-1", "a", "1.5", "1_0", "٣", "1e3", "99999999999"])
def test_only_plain_whole_numbers_pass(text: str) -> None:
    with pytest.raises(InputError, match="--redundant"):
        whole_numbers((text,), "--redundant")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", ""])
def test_seconds_are_finite_and_positive(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Seconds().convert(text, None, None)


def test_layer_ranges() -> None:
    assert layer_range("1:3", 4) == range(1, 3)
    assert layer_range(":2", 4) == range(0, 2)
    assert layer_range("2:", 4) == range(2, 4)
    for text in ("", "3", "3:3", "2:1", "0:5", "4:", "-1:2", "a:b", "1:2:3"):
        with pytest.raises(InputError, match="--layers"):
            layer_range(text, 4)


def test_foresight_and_planner_texts() -> None:
    assert foresight_of("previous") == "previous"
    assert foresight_of("noisy=0.2") == Noisy(0.2)
    assert foresight_of("rerouted=0.1") == Rerouted(0.1)
    assert planner_of("Quota(min_pairs=64)").rank[0].min_pairs == 64  # type: ignore[attr-defined]
    for text in ("nope", "noisy", "rerouted=2", "Search()", "rerouted=", "rerouted=x", "noisy=-1", "step=1"):
        with pytest.raises(InputError):
            foresight_of(text)
    with pytest.raises(InputError, match=r"there is no foresight 'Rerouted\(0.1\)'; did you mean 'rerouted='\? it is exact"):
        foresight_of("Rerouted(0.1)")
    with pytest.raises(InputError, match=r"there is no strategy 'formoe'; did you mean 'foremoe'\? the names are static"):
        planner_of("formoe")
    for text in ("nope", "Quota(nope=1)", "numpy:ndarray", "no_such_module:x", "numpy:nope", "__import__('os')"):
        with pytest.raises(InputError):
            planner_of(text)


WORD = st.sampled_from(["a.npz", "--ranks", "4", "x.json", "--json", "--json=y.json", "--", "-o", "b.JSON"])


@given(st.lists(WORD, max_size=7))
def test_json_takes_a_word_only_if_it_ends_in_json(words: list[str]) -> None:
    out = _with_value(words)
    end = words.index("--") if "--" in words else len(words)
    following = [*words[1:], ""]
    for i, (before, after) in enumerate(zip(words, out, strict=True)):
        alone = before == "--json" and i < end and (following[i].startswith("-") or not following[i].lower().endswith(".json"))
        assert after == ("--json=-" if alone else before)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=8,
    )
)
def test_plain_values_are_strict_json(value: object) -> None:
    json.dumps(plain(value), allow_nan=False)


def test_plain_takes_numpy_and_dataclasses() -> None:
    value = {"a": np.float64(math.nan), "b": np.arange(2), 3: (np.int32(1), math.inf), "s": CostModel(overlap=0.5)}
    assert plain(value) == {"a": None, "b": [0, 1], "3": [1, None], "s": {"objective": "time", "overlap": 0.5}}
