"""Nothing raises after an exchange between ranks without a test that all of them raise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from test_agreement import FAULTS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("runtime", "transfer", "distributed", "integrations")
EXCHANGES = {
    "gather", "all_to_all", "barrier", "exchange", "agree", "verdict", "meet", "private_gloo", "private_store", "_answered",
}  # fmt: skip
JOB, BEFORE = "megatron/test_megatron_job.py", "test_a_fault_of_one_rank_before_the_step_is_told_on_all"
ELSEWHERE = {  # function -> file of tests, and the test
    "transfer/engine.py:Engine._agree": (
        "transfer/test_faults.py", "test_the_sole_two_sided_backend_fails_in_an_update",
    ),
    "transfer/cupy_peer.py:CupyPeer.publish": ("transfer/test_cupy_peer.py", "test_misuse_ends_in_one_sentence"),
    "distributed/group.py:TorchGroup.gather": (
        "distributed/test_messages.py", "test_a_size_beyond_the_limit_is_refused_before_anything_is_allocated",
    ),
    "distributed/roll.py:Roll.connect": ("distributed/test_waits.py", "test_a_rank_that_dies_in_set_up_is_named"),
    "distributed/agreement.py:require_same": (
        "distributed/test_same_settings.py", "test_equal_values_say_nothing_and_the_first_difference_is_named_to_all",
    ),
    "distributed/group.py:make_on_all": (JOB, "test_a_rank_that_refuses_refuses_for_all"),
    "transfer/engine.py:Engine.__init__": ("transfer/test_engine_refusals.py", "test_what_ranks_must_agree_on_is_compared"),
    "integrations/megatron/attach.py:Attached._attach": (JOB, "test_a_rank_that_refuses_refuses_for_all"),
    "integrations/megatron/job.py:Job.run": (JOB, "test_work_that_one_group_cannot_plan_is_refused_on_all"),
    "integrations/megatron/layout.py:_given_or_found": (JOB, "test_a_rank_that_refuses_refuses_for_all"),
    "integrations/megatron/planning.py:Planning.agree": ("megatron/test_megatron_faults.py", BEFORE),
    "integrations/megatron/planning.py:Planning.require_fit": ("megatron/test_megatron_faults.py", BEFORE),
}  # fmt: skip
SAME = {  # why all ranks raise it without a word
    "distributed/private.py:private_group": "all ranks have a group of the same kind",
}


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions below a node, with the names of their classes and of the functions they are in."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            name = f"{prefix}.{child.name}".lstrip(".")
        if isinstance(child, ast.FunctionDef):
            yield name, child
        yield from functions(child, name)


def calls(function: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    """Names that are called, and the lines; not a tensor's `gather`, which has two arguments."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name != "gather" or len(node.args) == 1:
                yield name, node.lineno


def raising(sources: dict[str, str]) -> set[str]:
    """Functions that raise below an exchange between ranks: one of `EXCHANGES`, or a function of a module with one inside."""
    found = [(path, name, function) for path, text in sources.items() for name, function in functions(ast.parse(text))]
    plain = [(name, {called for called, _ in calls(function)}) for _, name, function in found if "." not in name]
    known, num = set(EXCHANGES), 0
    while num != len(known):
        num = len(known)
        known |= {name for name, called in plain if called & known}
    ends = {function.name for _, _, function in found if getattr(function.returns, "id", "") == "NoReturn"} | {"_require_none"}
    out = set()
    for path, name, function in found:
        exchanges = [line for called, line in calls(function) if called in known]
        errors = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Raise)]
        errors += [line for called, line in calls(function) if called in ends]
        if exchanges and max(errors, default=0) >= min(exchanges):
            out.add(f"{path}:{name}")
    return out


def test_all_that_raises_after_an_exchange_is_tried() -> None:
    paths = [path for room in ROOMS for path in (ROOT / "foremoe" / room).rglob("*.py")]
    found = raising({str(path.relative_to(ROOT / "foremoe")): path.read_text() for path in paths})
    tried = {function for fault in FAULTS.values() for function in fault.covers}
    assert found == tried | ELSEWHERE.keys() | SAME.keys()
    for path, test in ELSEWHERE.values():
        assert f"def {test}(" in (ROOT / "tests" / path).read_text(), (path, test)


def test_a_new_one_is_found() -> None:
    after = "def f(group):\n    if any(group.gather(1)):\n        raise ValueError\n"
    before = "def g(group):\n    if not group:\n        raise ValueError\n    group.gather(1)\n"
    tensor = "def h(x):\n    if x.gather(1, x).any():\n        raise ValueError\n"
    through = "class C:\n    def m(self, group):\n        f(group)\n        self._fail()\n    def _fail(self) -> NoReturn: ...\n"
    assert raising({"runtime/new.py": after + before + tensor + through}) == {"runtime/new.py:f", "runtime/new.py:C.m"}
