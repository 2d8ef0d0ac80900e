"""veRL's own training loop with foremoe trains as it does without, and its logger has foremoe's figures of both stages."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

for package in ("ray", "transfer_queue", "hydra"):
    pytest.importorskip(package, reason=f"veRL's own loop needs {package}; make test-verl installs it")

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "verl.md"
LIMIT_S = 1800  # two quiet cores take less than 240
PAIRS = ("R3", "R2", "V1")
MINI_BATCHES = 4  # of an update: two, and two epochs
STAGES = {"R3": ("recompute", "update"), "R2": ("update",), "V1": ("recompute", "update")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All arms, one after the other, in one Ray of their own."""
    folder = tmp_path_factory.mktemp("loop")
    arms = [f"{pair}{tail}" for pair in PAIRS for tail in ("", "-foremoe")]
    command = [sys.executable, "-W", "ignore", str(HERE / "loop.py"), str(folder), *arms]
    with (folder / "output").open("w+") as output:
        code = run_to_end(command, output)
        output.seek(0)
        assert code == 0, output.read()[-5000:]
    return folder


def run_to_end(command, output):
    """Exit code; whatever happens, no process of it is left."""
    import psutil

    started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        return started.wait(LIMIT_S)
    finally:
        if started.poll() is None:
            for process in [*psutil.Process(started.pid).children(recursive=True), started]:
                os.kill(process.pid, signal.SIGKILL)
            started.wait()


def logged(folder, arm):
    return [json.loads(line)["data"] for line in (folder / arm / "logged.jsonl").read_text().splitlines()]


def results(folder, arm):
    return {path.name: torch.load(path) for path in sorted((folder / arm).glob("step_*"))}


@pytest.mark.parametrize("pair", PAIRS)
def test_same_losses_gradient_norms_and_weights(folder, pair):
    plain, planned = logged(folder, pair), logged(folder, f"{pair}-foremoe")
    assert len(plain) == len(planned) == 3
    for a, b in zip(plain, planned, strict=True):
        for name in ("actor/loss", "actor/pg_loss", "actor/entropy", "actor/ppo_kl"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), name
        assert b["actor/grad_norm"] == pytest.approx(a["actor/grad_norm"], rel=1e-4)
        assert {name for name in b if "foremoe" not in name} == set(a)
    before, after = results(folder, pair), results(folder, f"{pair}-foremoe")
    assert len(before) == 4 * (4 if pair == "R3" else 2), "each rank, before the first step and after every step"
    for name, found in before.items():
        for weight, value in found["weights"].items():
            torch.testing.assert_close(after[name]["weights"][weight], value, rtol=0, atol=1e-4)
    moved = [(before["step_3_rank_0.pt"]["weights"][n] - w).abs().max() for n, w in before["step_0_rank_0.pt"]["weights"].items()]
    assert max(moved) > 1e-2, "there should be something to learn"


@pytest.mark.parametrize("pair", PAIRS)
def test_the_logger_has_the_figures_of_both_stages_under_the_names_of_the_page(folder, pair):
    documented = set(re.findall(r"`([a-z_/N]+)`", re.search(r"\n\| metric \|.*?\n\n", PAGE.read_text(), re.DOTALL)[0]))
    for step in logged(folder, f"{pair}-foremoe"):
        found = {name.removeprefix("actor/foremoe/") for name in step if "foremoe" in name}
        assert {name.split("/")[0] for name in found} - {"compile_s"} == set(STAGES[pair])
        for stage in STAGES[pair]:
            of = {re.sub(r"layer_\d+", "layer_N", name.partition("/")[2]) for name in found if name.startswith(stage)}
            absent = {"skew_served"}  # all arms replay
            if pair != "V1":
                absent.add("pack_s")
            if pair == "R2":  # replays the last token, too
                absent.add("drift/layer_N")
            assert of == documented - absent


@pytest.mark.parametrize("pair", PAIRS)
def test_figures_are_of_the_whole_step(folder, pair):
    for number, step in enumerate(logged(folder, f"{pair}-foremoe")):
        for stage in STAGES[pair]:
            of = {name.rpartition("/")[2]: value for name, value in step.items() if f"/{stage}/" in name and "layer_" not in name}
            assert of["unplanned"] == 0.0, "of the first step, too"
            assert of["skew_after"] < min(of["skew_before"], 1.1)
            assert of["replicas"] > 0 and of["received_bytes"] > 0 and of["slot_bytes"] > 0
            # Each is that of the slowest rank, and another one may be slow in planning than in sharing.
            assert of["begin_exposed_s"] >= max(of["plan_s"], of["share_s"]) > 0
            counted = sum(value for name, value in step.items() if f"/{stage}/counted/" in name)
            known = of["known_rows"] / (of["known_rows"] + counted)
            if number:
                assert known == 1.0, "in the first step the first stage of a kind compares, and so counts"
            else:
                assert known == 0.0 if stage == "recompute" else 0.5 < known < 1.0
            if pair != "R2":
                # The model routes the last token of each of the 16 sequences, in 4 layers, twice: a figure of one mini-batch, or
                # a mean over mini-batches, would be a share of that.
                assert of["drift"] == 16 * 4 * 2 * (MINI_BATCHES // 2 if stage == "update" else 1)


@pytest.mark.parametrize("pair", PAIRS)
def test_nothing_is_compiled_after_the_first_step_has_begun(folder, pair):
    steps = logged(folder, f"{pair}-foremoe")
    assert ["actor/foremoe/compile_s" in step for step in steps] == [True, False, False], "told once"
    for rank in range(4 if pair == "R3" else 2):
        first, *later = (results(folder, f"{pair}-foremoe")[f"step_{i}_rank_{rank}.pt"]["compile_s"] for i in range(4))
        assert later == [first] * 3
