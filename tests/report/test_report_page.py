"""What the page holds: numbers that come back as they went in, names that stay text, the same bytes every time."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from report_case import HOSTILE, G, L, M, arrays_of, facts_of, measured, packed_of, small_problem, unpack

import foremoe
from foremoe.base.errors import InputError
from foremoe.plan.replicas import Replicas
from foremoe.plan.text import static_load_MLG
from foremoe.report import write_report
from foremoe.report.packing import DTYPES, Packer
from foremoe.report.rows import FROM_HOST, NOT_SENT, executable_problem, link_bytes, sources_of
from foremoe.report.strategy_table import strategy_table
from foremoe.report.template import script_json
from foremoe.simulate import run_stage
from foremoe.transfer.timeline import Timeline


@given(st.data())
def test_packed_arrays_come_back(data):
    packer, given_arrays = Packer(), {}
    for i in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(DTYPES))
        array = data.draw(hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)))
        packer.add(f"a{i}", array, dtype, differences=dtype == "int32" and data.draw(st.booleans()))
        given_arrays[f"a{i}"] = array
    back = unpack(packer.contents, packer.text())
    for name, array in given_arrays.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()


def test_values_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="cannot hold many from 0 to 70000"):
        Packer().add("many", np.array([0, 70000]), "uint16")


def test_the_page_holds_every_load_and_replica(case, page):
    arrays, plan = arrays_of(page.read_text()), case.plan
    assert (arrays["load_MLE"] == plan.load_MLE).all()
    # What the page's script does: homes first, then quotas move along the replicas.
    load_NG = static_load_MLG(plan).reshape(-1, G).astype(np.int64)
    row_Y = np.repeat(np.arange(M * L), arrays["replicas_N"])
    home_Y = arrays["home_rank_LE"][row_Y % L, arrays["expert_Y"]]
    np.subtract.at(load_NG, (row_Y, home_Y), arrays["quota_Y"])
    np.add.at(load_NG, (row_Y, arrays["rank_Y"]), arrays["quota_Y"])
    assert (load_NG == plan.load_NG).all()
    assert (arrays["load_bound_ML"] == plan.load_bound_ML).all()


@pytest.mark.parametrize("name", ["eplb-exact", "foremoe"])
def test_replicas_of_any_plan_add_up_to_its_loads(case, name):
    plan, _ = foremoe.STRATEGIES[name].plan(case.problem)
    found = Replicas.of(plan)
    load_NG, source_Z = static_load_MLG(plan).reshape(-1, G).astype(np.int64), sources_of(plan, found)
    quota_Z = plan.quota_NGS[found.row_Z, found.rank_Z, found.slot_Z]
    np.subtract.at(load_NG, (found.row_Z, found.home_Z), quota_Z)
    np.add.at(load_NG, (found.row_Z, found.rank_Z), quota_Z)
    assert (load_NG == plan.load_NG).all()
    assert set(source_Z.tolist()) <= {FROM_HOST, NOT_SENT, *range(G)}
    assert ((source_Z == NOT_SENT).all()) == (not plan.executable)


def test_links_carry_what_leaves_and_arrives(case):
    link = link_bytes(case.problem, case.plan, Replicas.of(case.plan))
    assert link["peer out"].sum() == link["peer in"].sum() and link["rdma out"].sum() == link["rdma in"].sum()
    weights = len(case.plan.transfers) * case.problem.model.expert_bytes
    gradients = case.plan.num_replicas * case.problem.model.gradient_bytes
    assert link["peer in"].sum() + link["rdma in"].sum() + link["host in"].sum() == weights + gradients


def test_the_page_says_how_long_ranks_waited_for_copies(case, tmp_path):
    for timelines, waited_s in ((measured(case.plan), 0.006), ([Timeline(rank=0, begin_s=0.0, wall_s=1.0)], 0.0)):
        write_report(tmp_path / "r.html", case.problem, case.plan, runs=case.runs, timelines=timelines)
        assert facts_of((tmp_path / "r.html").read_text())["waited_s"] == pytest.approx(waited_s)


def test_names_stay_text(case, tmp_path):
    problem = small_problem(HOSTILE)
    plan, _ = foremoe.Planner().plan(problem)
    row = {"solver": HOSTILE, "skew_mean": 1.0, "note": HOSTILE}
    write_report(tmp_path / "r.html", problem, plan, strategies=[row], timelines=measured(plan), source=HOSTILE, date=HOSTILE)
    text = (tmp_path / "r.html").read_text()
    assert "alert(1)</" not in text and text.count("<!--") == 0
    clean = write_report(tmp_path / "c.html", case.problem, case.plan)
    assert clean is None
    opened = len(re.findall(r"<script|</script", (tmp_path / "c.html").read_text()))
    assert len(re.findall(r"<script|</script", text)) == opened
    facts = facts_of(text)
    assert facts["model"] == facts["source"] == facts["strategies"]["rows"][0]["name"] == HOSTILE


@given(st.text())
def test_json_in_a_script_never_ends_it(text):
    written = script_json({text: text})
    assert not set("<>&") & set(written) and written.isascii() and json.loads(written) == {text: text}


def test_the_page_asks_nothing_of_a_network(page):
    text = page.read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy and "unsafe" not in policy
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']""", text.partition("<body>")[0])
    assert "<noscript>" in text


def test_same_arguments_same_bytes(case, page, tmp_path):
    for name in "ab":
        write_report(tmp_path / name, case.problem, case.plan, runs=case.runs)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_plan_of_another_problem_is_refused(case, tmp_path):
    other = dataclasses.replace(case.problem, load_MLE=case.problem.load_MLE[::-1].copy(), load_MLGE=None)
    with pytest.raises(InputError, match="load differs"):
        write_report(tmp_path / "r.html", other, case.plan)
    with pytest.raises(InputError, match=r"\[M, L, G, S\]"):
        write_report(tmp_path / "r.html", dataclasses.replace(case.problem, redundant=2), case.plan)
    with pytest.raises(InputError, match="homes"):
        turned = dataclasses.replace(case.problem, home_LE=case.problem.home_LE[:, ::-1].copy())
        write_report(tmp_path / "r.html", turned, case.plan)
    with pytest.raises(InputError, match="cannot write"):
        write_report(tmp_path / "none" / "r.html", case.problem, case.plan)
    assert not list(tmp_path.iterdir())


def test_a_problem_is_posed_again_as_the_plan_says(case):
    other = dataclasses.replace(case.problem, redundant=0, cost=foremoe.CostModel(objective="balance"))
    assert executable_problem(other, case.plan).same_as(case.problem)


def test_what_no_strategy_has_is_no_column():
    table = strategy_table(
        [{"solver": "a", "skew_mean": 1.5, "simulated_stage_s": 2.0}, {"solver": "b", "skew_mean": float("nan")}]
    )
    assert [(c["heading"], c["unit"]) for c in table["columns"]] == [("skew", "mean"), ("stage", "ms")]
    assert [row["cells"] for row in table["rows"]] == [[1.5, 2000.0], [None, None]]


def test_headline_is_the_plan_s_own(case, tmp_path):
    write_report(tmp_path / "r.html", case.problem, case.plan, planner_report=case.report)
    facts = facts_of((tmp_path / "r.html").read_text())
    h = facts["headline"]
    assert h["after"]["mean"] == case.plan.skew_ML.mean() and h["gap_max"] == case.plan.load_gap_ML.max()
    assert h["planned_s"] == pytest.approx(float(case.plan.cost_ML.sum().total_s))
    assert facts["parts"]["planned"]["compute_s"] == pytest.approx(float(case.plan.cost_ML.compute_s.sum()))
    assert facts["waited_s"] is None and facts["simulated"] is None and facts["planning"]["rows"] == M * L


def test_a_large_plan_stays_small(tmp_path):
    """94 layers, 64 ranks, four micro-steps: an eighth of a mini-batch of 32 takes less than an eighth of 5 MB."""
    work = foremoe.synthetic_workload("qwen3-235b-a22b", num_ranks=64, tokens_per_rank=8192, micro_steps=4, regime="mid")
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks=64), redundant=1)
    plan, _ = foremoe.Planner().plan(problem)
    write_report(tmp_path / "r.html", problem, plan, runs=run_stage(problem, plan))
    text = (tmp_path / "r.html").read_text()
    assert len(packed_of(text)) < 5e6 / 8 and len(json.dumps(facts_of(text))) < 1e5
