"""The public surface after ``import foremoe`` alone; tests/test_tree.py holds that every `__all__` is whole."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import foremoe

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", foremoe.__all__)
def test_every_public_name_is_found_on_demand(name: str) -> None:
    """Asks the lazy way itself: other tests of this process may have imported the submodules already."""
    assert foremoe.__getattr__(name) is getattr(foremoe, name)
    assert name in dir(foremoe)


def test_rooms_and_errors_are_attributes_in_a_new_process() -> None:
    code = (
        "import foremoe\n"
        "foremoe.simulate.simulate, foremoe.transfer.Engine, foremoe.runtime.Runtime, foremoe.report.write_report\n"
        "foremoe.calibrate.fit, foremoe.TransferError, foremoe.StaleWeights, foremoe.testing.SolverTests\n"
        "foremoe.distributed.TorchGroup, foremoe.levels.RankSolver, foremoe.workload.Dealt, foremoe.integrations\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_one_base_of_all_errors_and_the_built_in_ones_that_programs_may_catch() -> None:
    of = {foremoe.InputError: ValueError, foremoe.PlanError: ValueError, foremoe.TransferError: RuntimeError}
    for kind, built_in in of.items():
        assert issubclass(kind, foremoe.Error) and issubclass(kind, built_in)
    assert issubclass(foremoe.StaleWeights, foremoe.TransferError) and not issubclass(foremoe.Error, (ValueError, RuntimeError))
    with pytest.raises(foremoe.Error, match="no such"):
        foremoe.Cluster.preset("no such cluster", num_ranks=8)


def test_import_needs_neither_torch_nor_numba() -> None:
    heavy = "[name for name in ('torch', 'numba', 'safetensors', 'numpy', 'cupy') if name in sys.modules]"
    used = "foremoe.Planner; foremoe.STRATEGIES; foremoe.compare; print('torch' in sys.modules)"
    code = f"import sys, foremoe; print({heavy}); {used}"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.split() == ["[]", "False"], run.stdout + run.stderr


def test_what_a_notebook_shows_fits_a_line_or_three():
    """Arrays in full would fill pages."""
    work = foremoe.synthetic_workload("gpt-oss-20b", num_ranks=4, tokens_per_rank=64, micro_steps=2, num_layers=2, regime="mid")
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", 4), redundant=1)
    plan, summary = foremoe.Planner().plan(problem)
    for shown in (work, problem, problem.cluster, plan, plan.transfers, summary, foremoe.simulate.simulate(problem, plan)):
        assert repr(shown).startswith(type(shown).__name__) and len(repr(shown)) < 400


def test_a_notebook_shows_fields_and_the_summary_of_a_plan() -> None:
    """Text of the user, such as a model's name, is never markup."""
    work = foremoe.synthetic_workload("gpt-oss-20b", num_ranks=4, tokens_per_rank=64, micro_steps=2, num_layers=3, regime="mid")
    model = dataclasses.replace(foremoe.Model.preset("gpt-oss-20b"), name="<b>mine</b>")
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", 4), model=model, redundant=1)
    plan, summary = foremoe.Planner().plan(problem)
    run, gain = foremoe.simulate.simulate(problem, plan), foremoe.gain(problem, plan)
    for shown in (work, problem.cluster, plan, summary, run, gain):
        ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")  # well formed
    page = plan._repr_html_()
    assert "<b>" not in page and "&lt;b&gt;mine" in page and "<th style='text-align:left'>skew</th>" in page
    assert "int32 [2, 3, 4, 32]" in work._repr_html_()
    assert "start: skew mean" in summary._repr_html_() and f"{gain.speedup:.2f}x" in gain._repr_html_()
    shares = [float(share) for share in re.findall(r"\((\d+\.\d)%\)", run._repr_html_())]
    assert sum(shares) == pytest.approx(100.0, abs=0.5)


def test_a_plan_draws_its_skew_on_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    work = foremoe.synthetic_workload("gpt-oss-20b", num_ranks=4, tokens_per_rank=64, micro_steps=2, num_layers=3, regime="mid")
    plan, _ = foremoe.Planner().plan(foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", 4), redundant=1))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(foremoe.InputError, match=r"Plan\.plot needs matplotlib; pip install matplotlib"):
            plan.plot()
    matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    matplotlib.use("Agg")
    static, planned = (axis.images[0] for axis in plan.plot().axes[:2])
    assert np.array_equal(planned.get_array(), plan.skew_ML) and static.get_array().shape == (2, 3)
    assert static.get_clim() == planned.get_clim() == (1.0, static.get_array().max())


def test_toml_is_read_without_the_package_that_writes_it() -> None:
    """GPU images lack it, and running a plan writes none."""
    code = (
        "import sys; sys.modules['tomli_w'] = None\n"
        "import foremoe; cluster = foremoe.Cluster.preset('8xh100', num_ranks=8); print(cluster.num_ranks)\n"
        "cluster.to_toml('/dev/null')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "8" and "writing TOML needs tomli-w" in run.stderr, run.stderr
