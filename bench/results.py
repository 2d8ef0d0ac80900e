"""Lists all committed tables with their commands and measured code, and makes tables again if that code has changed.

    python -m bench.results [NAME ...] [--list]

The command makes the tables that are named or, by default, those that are older than their code, shortest first. A new file
replaces that of the last run. A table is current if its code equals the code at the commit that its file names, apart from
comments, docstrings and messages. An interrupted run can therefore be continued. Pages that show a table are not changed. The
command names each such page when it replaces the file.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.cases import RECORDED
from bench.output import hardware

ROOT = Path(__file__).resolve().parents[1]
PLANS = ("foremoe/levels.py", "foremoe/machine", "foremoe/planner", "foremoe/problem", "foremoe/simulate", "foremoe/solvers",
         "foremoe/synthetic", "foremoe/workload")  # fmt: skip
RUNS = ("foremoe/distributed", "foremoe/runtime", "foremoe/transfer")
MEGATRON = (
    *RUNS, "foremoe/integrations/megatron", "tests/megatron/slot_path.py", "tests/megatron/unit_test_layers.py",
    "tests/megatron/whole_layer.py",
)  # fmt: skip
SYSTEMS = ("bench/systems.py", "bench/taot.py", *PLANS)
PUBLISHED = ("bench/published_parts.py", "bench/published_rows.toml", "bench/published_runs.py", *SYSTEMS)


class Table(NamedTuple):
    """A result: the beginning of its file's name, the module that makes it with options, the code that it measures, and minutes.

    Without minutes it needs a GPU or an environment of its own, and the command says which; `recorded` needs recorded routing.
    """

    name: str
    command: str
    code: tuple[str, ...]
    minutes: int = 0
    recorded: bool = False

    @property
    def made_elsewhere(self) -> bool:
        """True if something that it needs is not here."""
        return not self.minutes or (self.recorded and not RECORDED.exists())

    def paths(self) -> list[str]:
        """All files and folders that it measures."""
        module = self.command.split()[0].replace(".", "/")
        return [path for path in (f"{module}.py", *self.code) if (ROOT / path).exists()]

    def files(self) -> list[Path]:
        """Its files, the newest last; more than one only where several machines have it."""
        own = re.compile(rf"{self.name}_[a-z0-9-]+_\d{{4}}-\d\d-\d\d\.(md|json)")
        found = [path for path in (ROOT / "bench" / "results").glob("*") if own.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.stem[-10:])

    def why(self) -> str:
        """Reason to make it again; empty while it is current."""
        if not self.files():
            return "no file"
        commit = re.search(r"commit ([0-9a-f]{7,40})(\+?)", self.files()[-1].read_text())
        if commit is None or _git("cat-file", "-t", commit[1]).strip() != "commit":
            return "its commit is not known"
        if commit[2]:
            return f"made of changes to {commit[1]} that were not committed"
        names = changed(commit[1], self.paths())
        return f"{names[0]} changed" + f", with {len(names) - 1} more" * (len(names) > 1) if names else ""


TABLES = (
    Table("reached", "bench.reached", ("foremoe/problem/kernels/reached.py", *PLANS), 2, recorded=True),
    Table("nearness", "bench.nearness --long 100000", ("bench/cases.py", *PLANS), 4, recorded=True),
    Table("host-store", "bench.host_store", ("bench/closed_form.py", *PLANS), 4),
    Table("megatron_slots", "bench.megatron_slots", MEGATRON, 6),
    Table("overheads", "bench.overheads", PUBLISHED, 1),
    Table("soak", "bench.soak", (*RUNS, "foremoe/report", *PLANS), 5),
    Table("verl_planning", "bench.verl_planning", (*PLANS, *RUNS, "foremoe/routing/readers/counting.py"), 11),
    Table("knowledge", "bench.knowledge", SYSTEMS, 2),
    Table("robust", "bench.robust --layers 6", ("bench/cases.py", *SYSTEMS), 2, recorded=True),
    Table("bounds", "bench.bounds", PLANS, 1),
    Table("ablation", "bench.ablation", PLANS, 6),
    Table("ablation-parts", "bench.ablation --parts --cases 60", ("bench/parts.py", "bench/closed_form.py", *PLANS), 4),
    Table("closed-form", "bench.closed_form --cases 120", PLANS, 2),
    Table("published", "bench.published", PUBLISHED, 1),
    Table("sensitivity", "bench.sensitivity --ep 16", ("bench/throughput.py", *SYSTEMS), 2),
    Table("layouts", "bench.layouts", ("foremoe/advice", *PLANS), 6),
    Table("advice", "bench.advice --micro-steps 8 --layers 16", ("foremoe/advice", "bench/cases.py", *PLANS), 4, recorded=True),
    Table("strategies", "bench.run", ("bench/cases.py", *PLANS), 25, recorded=True),
    Table("throughput", "bench.throughput", SYSTEMS, 3, recorded=True),
    Table("validation", "bench.validation",
          ("bench/validation_ranks.py", "examples/grpo", "foremoe/calibrate", *RUNS, *PLANS), 12),
    Table("drills", "bench.drills", ("bench/drill_worlds.py", *RUNS), 5),
    Table("cache-drills", "bench.cache_drills", ("foremoe/base/compiled.py",), 30),
    Table("megatron_lm", "bench.megatron_lm --checkout $FOREMOE_MEGATRON_LM", MEGATRON, 2),
    Table("megatron_layers", "bench.megatron_layers --checkout $FOREMOE_MEGATRON_LM", MEGATRON, 20),
    Table("mutated-runs", "mutated_runs --cases 2000",
          ("tests/mutated_runs.py", "tests/field_mutations.py", "foremoe/plan", *RUNS, *PLANS), 1),
    Table("fuzz", "tests.fuzz --inputs 1000000",
          ("tests/fuzz", "foremoe/base", "foremoe/plan", "foremoe/routing", "foremoe/workload"), 25),
    Table("plan_digests", "python -m bench.plan_digest --write FILE", PLANS),
    Table("megatron", "make test-megatron RAN=FILE", MEGATRON),
    Table("megatron-newest", "make test-megatron-newest RAN=FILE", MEGATRON),
    Table("stages", "python3 tests/stages.py --out FILE", ("tests/stages.py",)),
    *(Table(f"gpu-{part}", "python -m bench.gpu, on a GPU", ("bench/gpu", "foremoe/runtime", "foremoe/transfer"))
      for part in ("right", "fast", "fast-2", "before", "model")),
)  # fmt: skip


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, errors="surrogateescape", check=False)
    return done.stdout


def changed(commit: str, paths: Sequence[str]) -> list[str]:
    """Files among `paths` whose code is another than at `commit`."""
    return [name for name in _git("diff", "--name-only", commit, "--", *paths).splitlines() if _differs(name, commit)]


@functools.cache
def _differs(name: str, commit: str) -> bool:
    now = ROOT / name
    text = now.read_text(errors="surrogateescape") if now.exists() else ""
    return _code(name, _git("show", f"{commit}:{name}")) != _code(name, text)


def _code(name: str, text: str) -> str:
    """Text without the comments, docstrings and messages of Python; other languages are left as they are.

    A message is any string of several words.
    """
    if not name.endswith(".py"):
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
        elif isinstance(node, ast.JoinedStr):
            node.values = [part for part in node.values if not isinstance(part, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            node.value = ""
    return ast.dump(tree)


def target(table: Table) -> Path:
    """The file that a run of today writes."""
    machine = re.match(r"(\w+).*?, (\d+) cores", hardware())
    assert machine is not None
    date = datetime.date.today().isoformat()
    return ROOT / "bench" / "results" / f"{table.name}_{machine[1].lower()}-{machine[2]}core_{date}.md"


def make(table: Table) -> bool:
    """Runs a table's program; whether it wrote its file."""
    command = os.path.expandvars(table.command)
    if "$" in command:
        print(f"{table.name}: skipped, set {command[command.index('$') + 1 :]}", file=sys.stderr)
        return True
    before, new = table.files(), target(table)
    made = ROOT / "build" / new.name  # what a failed run wrote stays there
    made.unlink(missing_ok=True)
    print(f"{table.name}: about {table.minutes} min", file=sys.stderr, flush=True)
    folders = (".", "tests", "tests/transfer", "tests/megatron")
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in folders)}
    words = [sys.executable, "-W", "ignore", "-m", *command.split(), "--out", str(made)]
    code = subprocess.run(words, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, check=False).returncode
    if code or not made.exists():
        print(f"{table.name}: failed with code {code}", file=sys.stderr)
        return False
    made.replace(new)
    for old in (path for path in before if path != new):
        old.unlink()
        for page in (path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")] if old.name in path.read_text()):
            print(f"{table.name}: {page.relative_to(ROOT)} shows {old.name}, which is {new.name} now", file=sys.stderr)
    return True


def listing() -> str:
    """One line for each table: days since it was made, minutes, and what would be done."""
    lines = []
    for table in sorted(TABLES, key=lambda table: table.minutes):
        files, why = table.files(), table.why()
        days = str((datetime.date.today() - datetime.date.fromisoformat(files[-1].stem[-10:])).days) if files else "-"
        where = f"; not here: {table.command}" if table.made_elsewhere else f"; {table.minutes} min"
        lines.append(f"{table.name:16} {days:>3} days  {why or 'current'}{where if why else ''}")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = {table.name: table for table in sorted(TABLES, key=lambda table: table.minutes) if not table.made_elsewhere}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"make these, old or not; of {', '.join(here)}")
    parser.add_argument("--list", action="store_true", help="show the age of every table and what would run")
    args = parser.parse_args()
    if wrong := [name for name in args.names if name not in here]:
        parser.error(f"there is no table {', '.join(wrong)} to make here; choose from {', '.join(here)}")
    if args.list:
        print(listing())
        return
    chosen = [here[name] for name in args.names] or [table for table in here.values() if table.why()]
    failed = [table.name for table in chosen if not make(table)]
    sys.exit(f"not made: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
