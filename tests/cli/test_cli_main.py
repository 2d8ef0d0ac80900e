"""The group: help, version, exit codes, and what every command promises."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pytest
from cli_runs import bad, good, run

import foremoe
from foremoe.__main__ import main as foremoe_main
from foremoe.base.errors import PlanError
from foremoe.cli.main import COMMANDS, main
from foremoe.cli.options import CLUSTERS, IMBALANCES, MODELS, REGIMES
from foremoe.cli.progress import Progress
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.synthetic.counts import REGIMES as KNOWN_REGIMES
from foremoe.synthetic.imbalance import IMBALANCES as KNOWN_IMBALANCES

ROOT = Path(__file__).resolve().parents[2]


def subprocess_run(arguments: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "foremoe", *arguments], capture_output=True, text=True, cwd=ROOT, **options)  # type: ignore[call-overload,no-any-return]


def test_help_is_there_where_python_drops_docstrings() -> None:
    code = "print(main.help); [print(main.get_command(None, name).help) for name in COMMANDS]"
    command = [sys.executable, "-OO", "-c", f"from foremoe.cli.main import COMMANDS, main; {code}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = [main.help, *(main.get_command(None, name).help for name in COMMANDS)]  # type: ignore[arg-type,union-attr]
    assert all(text and len(text) > 60 for text in texts)
    assert shown == "".join(f"{text}\n" for text in texts)


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'numpy', 'numba', 'safetensors', 'torch'}"
    code = f"main(['--help'], standalone_mode=False); print({heavy} & set(sys.modules))"
    command = [sys.executable, "-c", f"import sys; from foremoe.cli.main import main; {code}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in COMMANDS) and shown.endswith("set()\n")


def test_python_dash_m() -> None:
    done = subprocess_run(["--version"])
    assert (done.returncode, done.stdout, done.stderr) == (0, f"foremoe {foremoe.__version__}\n", "")
    done = subprocess_run(["compare"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_no_arguments_show_the_help() -> None:
    assert good([]).stdout == good(["--help"]).stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example_and_explains_every_option(name: str) -> None:
    text = good([name, "--help"]).stdout
    assert "Example" in text and f"foremoe {name} " in text + " "
    command = main.get_command(click.Context(main), name)
    assert command is not None and command.name == name
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            record = option.get_help_record(click.Context(command))
            assert record is not None and record[1], option.name
            assert "default" in record[1] or "required" in record[1] or option.is_flag, option.name


def test_help_names_what_there_is() -> None:
    assert MODELS.split(", ") == list(Model.preset_names())
    assert CLUSTERS.split(", ") == list(Cluster.preset_names())
    assert list(REGIMES) == list(KNOWN_REGIMES) and IMBALANCES == KNOWN_IMBALANCES


@pytest.mark.parametrize(
    "arguments", [["nope"], ["--nope"], ["compare", "--nope"], ["inspect"], ["check"], ["inspect", "a", "b"]]
)
def test_usage_errors_are_one_sentence(arguments: list[str]) -> None:
    bad(arguments)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        PermissionError(13, "Permission denied", "a.npz"),
        IsADirectoryError(21, "Is a directory"),
        PlanError("tokens", "here", "gone"),
    ],
)
def test_faults_of_the_machine_and_of_solvers_are_one_sentence(
    error: Exception, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("foremoe.cli.compare"), "build_case", fail)
    bad(["compare", trace])


def test_an_interrupt_is_one_line_and_130(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("foremoe.cli.compare"), "build_case", interrupt)
    result = run(["compare", trace])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_an_interrupt_during_the_imports_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __getattr__(self, _: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "foremoe.cli.main", Interrupted())  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="130"):
        foremoe_main()


def test_a_signal_while_planning_ends_with_130(tmp_path: Path, trace: str, dealing: list[str]) -> None:
    (tmp_path / "slow_solver.py").write_text(
        "import sys, time\nfrom foremoe.solvers import RankSolver\n"
        "class Slow(RankSolver):\n    def solve(self, problem, start):\n"
        "        print('here', file=sys.stderr, flush=True)\n        time.sleep(120)\n        return start\n"
    )
    command = [sys.executable, "-m", "foremoe", "plan", trace, *dealing, "--planner", "slow_solver:Slow"]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    # Where the tests run in the background of a shell, signals of the keyboard are ignored, and children inherit that.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **heard
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "here" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("interrupted\n") and "Traceback" not in err


def test_a_closed_pipe_is_no_traceback(trace: str, dealing: list[str]) -> None:
    command = [sys.executable, "-m", "foremoe", "inspect", trace]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for kind in (Terminal, io.StringIO):
        stream = kind()
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress() as progress:
            for done in range(5):
                progress("quota", done, 4)
            progress.note("warning: a note")
            progress("empty", 0, 0)
        shown[kind] = stream.getvalue()
    assert shown[io.StringIO] == "planning: quota\nwarning: a note\nplanning: empty\n"
    assert "75%" in shown[Terminal] and "100%" not in shown[Terminal] and "warning: a note\n" in shown[Terminal]
    # Something is there before the first task, and nothing is left at the end.
    assert shown[Terminal].startswith("\r\033[K0:00 elapsed, preparing") and shown[Terminal].endswith("\r\033[K")


def test_a_line_of_unknown_tasks_goes_when_its_task_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress("measuring")
    progress("links", 1, 2)
    assert not sys.stderr.getvalue().endswith("\033[K")  # type: ignore[attr-defined]
    progress("links", 2, 2)
    assert sys.stderr.getvalue().endswith("\r\033[K")  # type: ignore[attr-defined]


def test_progress_tells_which_of_how_many_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress(tasks=4)
    begin_s = progress._begin_s
    assert progress.status(begin_s + 3) == "0:03 elapsed, preparing"
    progress("quota", 4, 4)
    progress("greedy", 1, 2)
    assert progress.status(begin_s + 61) == "1:01 elapsed, about 1:41 left, [###-------] 38%, planning greedy (2 of 4)"
    assert "left" not in progress.status(begin_s + 4)
    # Compiling is no part of the rate.
    progress._compile_s, progress._num_compiled = lambda: 31.0, 126
    assert "1:01 elapsed, about 0:50 left" in progress.status(begin_s + 61)
    progress.num_done = 0
    assert progress.status(begin_s + 61)[:79].startswith(
        "1:01 elapsed, about 3:30 left, [#---------] 12%, 126 kernels compiled, "
    )
    progress.num_done = 1
    assert "left" not in Progress().status(begin_s + 61)
    progress("greedy", 2, 2)
    assert progress.status(begin_s + 62).endswith("finishing greedy (2 of 4)")


def test_compiling_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba import njit

    for kind in (Terminal, io.StringIO):
        stream = kind()
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress():
            njit(lambda x: x + 1)(1)
            njit(lambda x: x + 2)(1)
        assert stream.getvalue().count("compiling kernels that are not cached yet") == 1


def test_a_log_without_a_terminal_tells_that_compiling_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foremoe.cli.progress._PLAIN_S", 0.02)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as progress:
        time.sleep(0.1)
        assert not stream.getvalue()  # nothing is compiled
        progress._compile_s, progress._num_compiled = time.perf_counter, 126
        while "\n" not in stream.getvalue():
            time.sleep(0.01)
    assert stream.getvalue().startswith("planning: 126 kernels compiled so far, 0:0")


def test_a_file_or_place_with_a_slip_is_guessed(
    trace: str, dealing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slip = trace.replace("first", "frist")
    assert f"there is no file {slip!r}; did you mean 'first.npz'?" in bad(["plan", slip, *dealing])
    assert "did you mean" not in bad(["plan", "nowhere/x.npz", *dealing])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "recipes.py").write_text("from foremoe.solvers import Quota as Halve\n")
    for place, meant in (("recipes:Halv", "Halve"), ("recipe:Halve", "recipes"), ("foremoe.solver:Quota", "solvers")):
        assert f"did you mean {meant!r}?" in bad(["compare", trace, *dealing, "--planners", place])
    (tmp_path / "lacking.py").write_text("import nowhere_to_be_found\n")
    assert "did you mean" not in bad(["compare", trace, *dealing, "--planners", "lacking:Halve"])


def test_a_library_that_sends_tokens_names_its_way(trace: str, dealing: list[str]) -> None:
    assert "did you mean 'node'" in bad(["plan", trace, *dealing, "--dispatch", "DeepEP"])
    assert "did you mean 'pairs'" in bad(["plan", trace, *dealing, "--dispatch", "all-to-all"])
    assert "'pairs', 'node'" in bad(["plan", trace, *dealing, "--dispatch", "x"])


def test_a_command_or_preset_with_a_slip_is_guessed(trace: str, dealing: list[str]) -> None:
    assert "there is no command 'comapre'; did you mean 'compare'?" in bad(["comapre"])
    assert "did you mean 'foremoe'?" in bad(["compare", trace, *dealing, "--planners", "static,formoe"])
    for command, option in (("plan", "--planner"), ("compare", "--planners")):
        said = bad([command, trace, *dealing, option, "eplb"])
        assert "did you mean 'eplb-history', 'eplb-step' or 'eplb-exact'?" in said
    assert "did you mean 'gpt-oss-20b'?" in bad(["compare", "--synthetic", "gpt-oss20b"])
    assert "did you mean '8xb200'?" in bad(["compare", "--synthetic", "gpt-oss-20b", "--cluster", "8xB20O"])


def test_help_has_options_in_groups() -> None:
    text = good(["compare", "--help"]).stdout
    at = [
        text.index(f"\n{title}:\n") for title in ("Options", "Routing to plan", "Machine", "Trainer around the stage", "Output")
    ]
    assert at == sorted(at) and at[1] < text.index("--synthetic") < at[2] < text.index("--cluster") < at[3]
    assert text.index("--csv") > at[4]


def test_solvers_lists_every_strategy() -> None:
    from foremoe.planner.strategies import STRATEGIES

    text = good(["solvers"]).stdout
    assert [line.split()[0] for line in text.splitlines()[1 : len(STRATEGIES) + 1]] == list(STRATEGIES)


def test_doctor_says_what_there_is_and_what_is_broken(tmp_path: Path) -> None:
    parts = json.loads(good(["doctor", "--json"]).stdout)["parts"]
    found = {part["part"]: part["found"] for part in parts}
    assert found["foremoe"] == foremoe.__version__ and found["numpy"] == np.__version__ and "python" in found
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open\\nmore')")
    (tmp_path / "vllm-1.0.dist-info").mkdir()  # what an interrupted uninstall leaves
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "VERL_ENGINE_VENDOR": "amd"}
    broken = subprocess_run(["doctor"], env=environment)
    assert broken.returncode == 0 and "torch failed" in broken.stdout, broken
    assert "libcudart.so.13: cannot open" in broken.stdout and "Traceback" not in broken.stderr
    lines = [" ".join(line.split()) for line in broken.stdout.splitlines()]
    assert found["planner's kernels"] in ("compiled", "not compiled")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    assert "not compiled" in subprocess_run(["doctor"], env=environment).stdout
    assert "vllm broken: no metadata rollout" in lines and "VERL_ENGINE_VENDOR amd environment variable" in lines


TWO_GPUS = """
from types import SimpleNamespace
version = SimpleNamespace(cuda="13.0")
sizes = SimpleNamespace(name="H100", major=9, minor=0, total_memory=80e9)
cuda = SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda i: sizes,
    can_device_access_peer=lambda i, j: i < j,
)
"""


def test_doctor_says_which_gpus_have_no_access_to_each_other(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TWO_GPUS)
    (tmp_path / "verl").mkdir()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    lines = [" ".join(line.split()) for line in subprocess_run(["doctor"], env=environment).stdout.splitlines()]
    assert "GPU 1 H100 compute capability 9.0, 80 GB, CUDA 13.0" in lines
    assert "peer access not from GPU 1 to 0 CUDA IPC in cupy_peer; containers also need --ipc=host" in lines
    assert any(line.startswith("veRL plug-in ") for line in lines)
