"""Settings are checked where they are made, whatever they are made from, and may travel to other processes."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from foremoe.base.errors import InputError
from foremoe.integrations.settings import AttachSettings, Settings
from foremoe.machine.cluster import Cluster
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES, row_solver
from foremoe.problem.cost import CostModel
from foremoe.solvers import Quota
from foremoe.transfer.local import Local
from foremoe.transfer.settings import EngineSettings


def no_edit(load_E, node_G, num_base, options, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """A per-row function that leaves all experts at home."""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ({"planner": "lplb"}, {"planner": STRATEGIES["lplb"]}),
        ({"planner": "Planner(rank=(Quota(min_pairs=64),))"}, {"planner": Planner(rank=(Quota(min_pairs=64),))}),
        ({"planner": Quota()}, {"planner": Planner(rank=(Quota(),))}),
        ({"cost": "balance"}, {"cost": CostModel(objective="balance")}),
        ({"cost": "CostModel(overlap=0.5)"}, {"cost": CostModel(overlap=0.5)}),
        ({"backends": "collective"}, {"backends": ("collective",)}),
        ({"backends": ["pinned_host", "collective"]}, {"backends": ("pinned_host", "collective")}),
    ],
)
def test_text_is_what_it_stands_for(text: dict[str, Any], value: dict[str, Any]) -> None:
    assert Settings.of(text) == Settings(**value) == Settings.of(Settings(), **text)
    assert Settings.of(text).agreed() == Settings(**value).agreed()


def test_a_cluster_may_be_a_file(tmp_path: Any) -> None:
    cluster = Cluster.preset("8xh100", num_ranks=2)
    cluster.to_toml(tmp_path / "cluster.toml")
    found = AttachSettings.of({"cluster": str(tmp_path / "cluster.toml")}).cluster
    assert found is not None and found.same_as(cluster)


def test_a_cluster_file_whose_fit_explains_nothing_decides_nothing(tmp_path: Any) -> None:
    cluster = dataclasses.replace(Cluster.preset("8xh100", num_ranks=2), residual=12.58)
    cluster.to_toml(tmp_path / "cluster.toml")
    with pytest.raises(InputError, match=r"cluster\.toml has a residual of 1258%, above 100%"):
        AttachSettings.of({"cluster": str(tmp_path / "cluster.toml")})
    found = AttachSettings.of({"cluster": cluster}).cluster
    assert found is not None and found.same_as(cluster)


REFUSED: list[tuple[Any, str]] = [
    ({"redundent": 1}, r"there is no setting 'redundent'; did you mean 'redundant'\?"),
    ({"redundant": -1}, "redundant must be a whole number from 0"),
    ({"redundant": 1.5}, "redundant must be a whole number"),
    ({"redundant": "1"}, "redundant must be a whole number"),
    ({"planner": "hierarchicl"}, "there is no strategy 'hierarchicl'"),
    ({"planner": "Chian()"}, "Chian"),
    ({"planner": 3}, "not a solver"),
    ({"cost": "tiem"}, "objective must be"),
    ({"cost": 1.0}, "cost must be a CostModel"),
    ({"slot_depth": 0}, "slot_depth must be a whole number from 1 to 1024"),
    ({"slot_depth": "x"}, "slot_depth must be a whole number from 1 to 1024"),
    ({"replicas": "nodes"}, "replicas must be"),
    ({"cluster": {"num_ranks": 2}}, "cluster must be a Cluster"),
    ({"cluster": "/no/such/file.toml"}, "there is no file"),
    ({"backends": "collectiv"}, r"no transfer backend 'collectiv'; did you mean 'collective'\?"),
    ({"backends": ()}, "at least one transfer backend"),
    ({"backends": (Local,)}, "must be names or instances"),
    ({"prefetch": -1}, "prefetch must be a whole number from 0"),
    ({"return_bytes": 0}, "return_bytes must be a whole number from 1"),
    ({"debug": 1}, "debug must be true or false"),
    ({"packing": "ExpertAware()"}, "packing must be true or false"),
    ({"dump": 3}, "dump must be a line"),
    (3, "mapping of settings"),
    *(({name: bad}, f"{name} must be") for name in ("timeout_s", "group_timeout_s", "plan_limit_s", "compile_limit_s")
      for bad in (0, -1.0, float("nan"), float("inf"), 1e30, "5", True)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=str)
def test_what_does_not_fit_is_refused_in_one_sentence(given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        Settings.of(given)
    assert str(caught.value).count(". ") == 0


def test_an_engine_has_no_settings_of_planning() -> None:
    with pytest.raises(InputError, match="there is no setting 'redundant'; choose from backends, debug, prefetch"):
        EngineSettings.of(redundant=1)
    assert EngineSettings.of(Settings(redundant=2), prefetch=4).prefetch == 4


def test_every_setting_is_compared_or_named_as_a_ranks_own() -> None:
    found = {name.split(".")[0] for name in Settings().agreed()}
    assert found | Settings.ranks_own == {field.name for field in dataclasses.fields(Settings)}
    assert found & Settings.ranks_own == set()
    assert {"timeout_s", "group_timeout_s", "plan_limit_s", "compile_limit_s"} == Settings.ranks_own


def test_a_name_and_an_instance_of_a_backend_are_the_same() -> None:
    assert EngineSettings(backends=("local",)).agreed() == EngineSettings(backends=(Local(),)).agreed()


def test_settings_travel() -> None:
    settings = Settings.of({"planner": row_solver(no_edit, compiled=False), "backends": ["collective"]})
    again = pickle.loads(pickle.dumps(settings))
    assert again.agreed() == settings.agreed() and not again.planner.rank[0].compiled


@pytest.mark.parametrize("planner", ["eplb-step", "eplb-history", "eplb-exact", "laer", "Laer(tries=4)"])
def test_planners_whose_plans_no_engine_runs_are_refused(planner: str) -> None:
    """A job would start, and every stage of it run at home."""
    with pytest.raises(InputError, match=r"moves experts from their homes .* no engine runs such plans"):
        Settings.of({"planner": planner})
