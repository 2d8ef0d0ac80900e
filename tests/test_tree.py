"""Eight rules of the tree, read from the sources without importing them. A violation of each is planted to see it found."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import foremoe

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [
    "base", "machine", "routing", "workload", "synthetic", "problem", "plan", "levels", "solvers", "planner", "distributed",
    "transfer", "runtime", "simulate", "warm", "advice", "calibrate", "report", "integrations", "testing", "cli",
]  # fmt: skip
FACE = {"foremoe", "foremoe.__main__"}  # what users import and run: it may name every room
MAX_LINES, MAX_CODE, MAX_PARAMETERS = 300, 60, 8
# Violations of sources that nobody has mended so far. The list only shrinks.
NOT_YET: set[str] = set()
TOP = {
    ".ci", ".github", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile",
    "README.md", "SECURITY.md", "bench", "docs", "examples", "foremoe", "pyproject.toml", "tests",
}  # fmt: skip
# Folders by level and by kind, in which an algorithm lay in pieces.
GONE = ("foremoe/solvers/rank/", "foremoe/solvers/kernels/")

parse = functools.cache(ast.parse)  # each rule reads all files; none changes a tree
Sources = dict[str, str]  # text of each file by its path from the root


def module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def library(sources: Sources) -> dict[str, str]:
    """The path of every module of the library."""
    return {module(path): path for path in sources if path.startswith("foremoe/") and path.endswith(".py")}


def imports(tree: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    """Modules, or names of packages, that a file imports anywhere: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                yield full if full in modules or origin == "foremoe" else origin


def edges(sources: Sources) -> list[tuple[str, str]]:
    modules = library(sources)
    return sorted({(a, b) for a, path in modules.items() for b in imports(parse(sources[path]), modules) if a != b})


def room(name: str) -> str:
    return [*name.split("."), ""][1]


def circles(arrows: set[tuple[str, str]]) -> list[str]:
    """Names that lie on a circle of arrows: what is left when ends of chains are taken away."""
    while True:
        into, out = {b for _, b in arrows}, {a for a, _ in arrows}
        rest = {(a, b) for a, b in arrows if a in into and b in out}
        if rest == arrows:
            return sorted({a for a, _ in rest})
        arrows = rest


def against_the_flow(sources: Sources) -> list[str]:
    """Rule 1: a room imports only rooms before it; no circle between sub-packages, nor between files of ``problem``."""
    modules, found, arrows = library(sources), [], set()
    for a, b in edges(sources):
        if b.startswith("."):
            found.append(f"{a} imports {b}: write absolute imports")
        if a in FACE or not b.startswith("foremoe") or b == "foremoe.__version__":
            continue
        if room(b) not in ROOMS or room(a) not in ROOMS or ROOMS.index(room(b)) > ROOMS.index(room(a)):
            found.append(f"{a} imports {b}, which stands after it")
        elif room(a) == room(b):
            # Of `foremoe.room.part.file`, the part counts: a sub-package, or a file that lies directly in the room.
            c, d = (".".join(x.split(".")[:3]) for x in (a, b))
            if c != d and (room(a) == "problem" or any("/__init__" in modules.get(x, "") for x in (c, d))):
                arrows.add((c, d))
    return found + [f"{name} is on a circle of imports" for name in circles(arrows)]


def away_from_their_solver(sources: Sources) -> list[str]:
    """Rule 1, of solvers: one folder or file for each algorithm, with its kernels; nothing of ours needs a published system."""
    found = [f"{path} is in no solver's folder" for path in sources if path.startswith(GONE)]
    for a, b in edges(sources):
        of_published = b.startswith("foremoe.solvers.published")
        if of_published and a != "foremoe.solvers" and not a.startswith("foremoe.solvers.published"):
            found.append(f"{a} imports {b}, a published system")
    return found


def solvers_and_transfer_meet(sources: Sources) -> list[str]:
    """Rule 2: the plan is all that crosses between solvers and transfer."""
    return [f"{a} imports {b}" for a, b in edges(sources) if {room(a), room(b)} == {"solvers", "transfer"}]


def outside_imported(sources: Sources) -> list[str]:
    """Rule 3: nothing in the library imports its command line, its test suites, benches or examples."""
    found = []
    for a, b in edges(sources):
        top = b.split(".")[0]
        if top in ("bench", "examples", "tests") or (room(b) in ("cli", "testing") and room(a) != room(b) and a not in FACE):
            found.append(f"{a} imports {b}")
    return found


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Lines of a function's body, but for docstrings, comments and blank lines."""
    prose: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    body = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
    return sum(1 for i in body if i not in prose and lines[i - 1].strip() and not lines[i - 1].lstrip().startswith("#"))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters; named options with a default do not count where users call the function."""
    its = function.args
    names = [x.arg for x in (*its.posonlyargs, *its.args)]
    is_kernel = any(isinstance(d, ast.Name) and d.id == "kernel" for d in function.decorator_list)
    is_public = not function.name.startswith("_") or function.name.endswith("__")
    count_all = is_kernel or not is_public
    options = [x for x, default in zip(its.kwonlyargs, its.kw_defaults, strict=True) if default is None or count_all]
    return len(options) + len(names) - (names[:1] in (["self"], ["cls"]))


def too_large(sources: Sources) -> list[str]:
    """Rule 4: files of at most 300 lines, functions of at most 60 lines of code and 8 parameters, but for Triton's kernels, which
    take sizes one by one."""
    found = []
    for path in library(sources).values():
        lines = sources[path].splitlines()
        if len(lines) > MAX_LINES:
            found.append(f"{path} is too long")
        for node in ast.walk(parse(sources[path])):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if code_lines(node, lines) > MAX_CODE:
                    found.append(f"{path}: {node.name} is too long")
                if parameters(node) > MAX_PARAMETERS and "triton.jit" not in map(ast.unparse, node.decorator_list):
                    found.append(f"{path}: {node.name} has too many parameters")
    return found


def literal_all(tree: ast.Module) -> list[str] | None:
    """``__all__`` where it is a list of literal strings."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            try:
                return list(ast.literal_eval(node.value))
            except ValueError:
                return None
    return None


def bound(tree: ast.Module, origin: str) -> tuple[set[str], set[str]]:
    """Names that a package binds, in ``if`` and ``try`` too, and those of them that come from its own files."""
    all_names, its_own = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name for alias in node.names}
            all_names |= names
            its_own |= names if (node.module or "").startswith(origin) and origin != "foremoe" else set()
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and node in tree.body:
            all_names.add(node.name)
            its_own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            all_names.add(node.id)
    return all_names, {name for name in its_own if not name.startswith("_")}


def definitions(text: str) -> set[str]:
    return {node.name for node in parse(text).body if isinstance(node, ast.ClassDef)}


def unreachable(sources: Sources) -> list[str]:
    """Rule 5: a package lists what it offers in a literal ``__all__``: what it binds, what it and the docs speak of."""
    modules, found, listed = library(sources), [], {}
    for name, path in modules.items():
        if not path.endswith("/__init__.py"):
            continue
        tree = parse(sources[path])
        all_names, its_own = bound(tree, name)
        names = literal_all(tree)
        if names is None:
            if its_own:
                found.append(f"{name} has no literal __all__")
            continue
        listed[name] = names
        defined = {x for m in modules if m.startswith(f"{name}.") for x in definitions(sources[modules[m]])}
        spoken = defined & set(re.findall(r"(?<!`)`(\w+)`(?!`)", ast.get_docstring(tree) or ""))
        found += [f"{name}.{x} is listed and not there" for x in names if x not in all_names and f"{name}.{x}" not in modules]
        found += [f"{name}.{x} is there and not listed" for x in sorted((its_own | spoken) - set(names))]
    for path, text in sources.items():
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if path.endswith(".md") else ():
            try:
                tree = parse(block)
            except SyntaxError:  # pseudo-code
                continue
            found += [f"{path} imports {x}, which is not there" for x in documented(tree, modules, listed, sources)]
    return found


def documented(tree: ast.Module, modules: dict[str, str], listed: dict[str, list[str]], sources: Sources) -> Iterator[str]:
    """Names of the library that an example of the docs imports, or takes from ``foremoe``, in vain."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "foremoe":
            if node.attr not in [*listed.get("foremoe", ()), "__version__"]:
                yield f"foremoe.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "foremoe":
            there = listed.get(node.module or "") or bound(parse(sources.get(modules.get(node.module or "", ""), "")), "")[0]
            yield from (
                f"{node.module}.{a.name}" for a in node.names if a.name not in there and f"{node.module}.{a.name}" not in modules
            )


def calls(tree: ast.AST) -> Iterator[tuple[str, str, list[str], int]]:
    """Every call: what stands before the last dot, the name, the arguments as they are written, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            before, _, name = ast.unparse(node.func).rpartition(".")
            yield before, name, [ast.unparse(argument) for argument in (*node.args, *node.keywords)], node.lineno


def prints(sources: Sources) -> list[str]:
    """Rule 6: only the command line writes to the terminal."""
    found = []
    for name, path in library(sources).items():
        if room(name) == "cli" or name == "foremoe.__main__":
            continue
        tree = ast.parse(sources[path])
        found += [f"{path}:{line} prints: log it" for before, called, _, line in calls(tree) if (before, called) == ("", "print")]
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sys"]
        found += [f"{path}:{x.lineno} uses sys.{x.attr}: log it" for x in names if x.attr in ("stdout", "stderr")]
    return found


def other_loggers(sources: Sources) -> list[str]:
    """Rule 7: a module logs under its own name. Loggers of torch may be looked up, to quiet them."""
    found = []
    for path in library(sources).values():
        for before, name, given, line in calls(ast.parse(sources[path])):
            own = name == "getLogger" and ("".join(given) == "__name__" or "".join(given).startswith("'torch."))
            if name in ("getLogger", "getChild", "Logger") and not own:
                found.append(f"{path}:{line} has another logger than logging.getLogger(__name__)")
            if before == "logging" and name in LOGS:
                found.append(f"{path}:{line} logs as the root logger")
    return found


LOGS = {"debug", "info", "warning", "warn", "error", "critical", "exception", "log", "basicConfig"}
RULES = (
    against_the_flow,
    away_from_their_solver,
    solvers_and_transfer_meet,
    outside_imported,
    too_large,
    unreachable,
    prints,
    other_loggers,
)
# A small tree that keeps all rules, and what is added to it to break each.
CLEAN = {
    "foremoe/__init__.py": 'from foremoe import problem as problem\n__version__ = "1"\n__all__ = ["problem"]\n',
    "foremoe/problem/__init__.py": '"""Offers `Load`."""\nfrom foremoe.problem.load import Load\n__all__ = ["Load"]\n',
    "foremoe/problem/load.py": "from foremoe import __version__\nclass Load: ...\n",
    "foremoe/solvers/__init__.py": "",
    "foremoe/solvers/home/__init__.py": "",
    "foremoe/solvers/home/one.py": "from foremoe.problem.load import Load\n",
    "foremoe/solvers/search/__init__.py": "",
    "foremoe/solvers/search/two.py": "from foremoe.solvers.home.one import Load\n",
    "foremoe/cli/tables.py": "import sys\nprint('a table', file=sys.stderr)\n",
    "foremoe/transfer/engine.py": (
        "import logging\n_logger = logging.getLogger(__name__)\n_logger.warning('print(1)')\n"
        "logging.getLogger('torch.distributed')\n"
    ),
    "docs/load.md": "```python\nimport foremoe\nfrom foremoe.problem import Load\nforemoe.problem.Load()\n```\n",
}
PLANTED = [
    (against_the_flow, "foremoe/problem/late.py", "def solve():\n    import foremoe.solvers.home.one\n"),
    (against_the_flow, "foremoe/problem/late.py", "if TYPE_CHECKING:\n    from foremoe.solvers.home.one import Load\n"),
    (against_the_flow, "foremoe/problem/late.py", "from foremoe import solvers\n"),
    (against_the_flow, "foremoe/problem/late.py", "import foremoe\n"),
    (against_the_flow, "foremoe/problem/late.py", "from .load import Load\n"),
    (against_the_flow, "foremoe/new_room/late.py", "import foremoe.problem.load\n"),
    (against_the_flow, "foremoe/problem/load.py", "def load():\n    import foremoe.problem\nclass Load: ...\n"),
    (against_the_flow, "foremoe/solvers/home/three.py", "def load():\n    import foremoe.solvers.search.two\n"),
    (away_from_their_solver, "foremoe/solvers/kernels/three.py", ""),
    (away_from_their_solver, "foremoe/solvers/rank/three.py", ""),
    (away_from_their_solver, "foremoe/solvers/search/three.py", "def run():\n    from foremoe.solvers.published import quota\n"),
    (away_from_their_solver, "foremoe/planner/start.py", "from foremoe.solvers.published.quota import Quota\n"),
    (solvers_and_transfer_meet, "foremoe/transfer/engine.py", "def run():\n    from foremoe.solvers.home import one\n"),
    (solvers_and_transfer_meet, "foremoe/solvers/home/three.py", "import foremoe.transfer\n"),
    (outside_imported, "foremoe/solvers/home/three.py", "def run():\n    from bench import cases\n"),
    (outside_imported, "foremoe/solvers/home/three.py", "import foremoe.testing.samples\n"),
    (outside_imported, "foremoe/testing/samples.py", "from foremoe.cli import tables\n"),
    (too_large, "foremoe/problem/long.py", "\n" * 301),
    (too_large, "foremoe/problem/long.py", "def long():\n" + "    pass\n" * 61),
    (too_large, "foremoe/problem/long.py", "def wide(a, b, c, d, e, f, g, h, i): ...\n"),
    (too_large, "foremoe/problem/long.py", "@kernel\ndef wide(a, b, c, d, e, f, g, h, *, i=1): ...\n"),
    (too_large, "foremoe/problem/long.py", "class A:\n    async def _wide(self, a, b, c, d, e, f, g, h, *, i=1): ...\n"),
    (unreachable, "foremoe/problem/__init__.py", "from foremoe.problem.load import Load as Load\n"),
    (unreachable, "foremoe/problem/__init__.py", "from foremoe.problem.load import Load\n__all__ = [x for x in ('Load',)]\n"),
    (unreachable, "foremoe/problem/__init__.py", "from foremoe.problem.load import Load\n__all__ = ['Load', 'Unload']\n"),
    (
        unreachable,
        "foremoe/problem/__init__.py",
        "if X:\n    from foremoe.problem.load import A, Load\n__all__ = ['Load']\n",
    ),
    (unreachable, "foremoe/problem/__init__.py", "'''Offers `Load`.'''\n__all__ = []\n"),
    (unreachable, "docs/late.md", "```python\nfrom foremoe.problem.load import Unload\n```\n"),
    (unreachable, "docs/late.md", "```python\nimport foremoe\nforemoe.Problem()\n```\n"),
    (prints, "foremoe/problem/late.py", "def load():\n    print('loaded')\n"),
    (prints, "foremoe/transfer/late.py", "import sys\nsys.stderr.write('loaded')\n"),
    (other_loggers, "foremoe/problem/late.py", "import logging\n_logger = logging.getLogger('foremoe')\n"),
    (other_loggers, "foremoe/problem/late.py", "import logging\n_logger = logging.getLogger()\n"),
    (other_loggers, "foremoe/problem/late.py", "from logging import getLogger\n_logger = getLogger('mine')\n"),
    (other_loggers, "foremoe/problem/late.py", "import logging\nNAME = 'mine'\n_logger = logging.getLogger(name=NAME)\n"),
    (other_loggers, "foremoe/problem/late.py", "import logging\n_logger = logging.getLogger(__name__).getChild('mine')\n"),
    (other_loggers, "foremoe/problem/late.py", "import logging\ndef load():\n    logging.warning('late')\n"),
]


@pytest.fixture(scope="module")
def sources() -> Sources:
    paths = [*(ROOT / "foremoe").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(paths)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(sources, rule):
    assert [violation for violation in rule(sources) if violation not in NOT_YET] == []


def test_no_exception_outlives_its_need(sources):
    assert all(any(violation in rule(sources) for rule in RULES) for violation in NOT_YET)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_clean_tree_keeps_the_rule(rule):
    assert rule(CLEAN) == []


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED)
def test_a_planted_violation_is_found(rule, path, text):
    assert rule(CLEAN | {path: text}) != []


def test_what_does_not_count_as_size():
    """Docstrings, comments, blank lines, ``self``, and named options of functions that users call."""
    head = "class A:\n    def f(self, a, b, c, d, e, f, g, h, *, i=1):\n"
    prose = '        """Some.\n\n        Prose.\n        """\n\n        # Why.\n'
    assert too_large({"foremoe/problem/a.py": head + prose + "        pass\n" * 60}) == []


def test_every_listed_name_loads(sources):
    for name, path in library(sources).items():
        if path.endswith("/__init__.py") and "integrations" not in name:  # those need what they integrate with
            package = importlib.import_module(name)
            assert [x for x in getattr(package, "__all__", ()) if not hasattr(package, x)] == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git: this is not a checkout")
def test_nothing_else_lies_at_the_top():
    """Files that examples of the pages write stay out of the repository."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    assert {path.split("/")[0] for path in tracked if path} == TOP


def test_no_test_module_runs_a_kernel_when_it_is_imported(used_kernels):
    """Each worker collects all tests, and would compile the kernel before its first one."""
    in_collection, used_by_now = used_kernels
    assert in_collection == set()
    foremoe.RoutingTrace(topk_TLK=np.zeros((1, 1, 1), np.uint8), num_experts=1, seq_len_Q=[1])
    assert "foremoe.routing.checks.first_fault" in used_by_now()
