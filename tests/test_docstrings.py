"""Docstrings that editors and documentation tools can read: Google style, one name per entry; read without importing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "foremoe").rglob("*.py"))}
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
ENTRY = re.compile(r"(\*{0,2}[A-Za-z_][\w.]*)(?: \([^)]*\))?: \S")
SECOND_ENTRY = re.compile(r" {3,}[\w, ]+: ")
# Rooms whose docstrings nobody has mended so far. The list only shrinks.
NOT_YET: set[str] = set()

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.ClassDef | Function


def sections(doc: str) -> Iterator[tuple[str, list[str]]]:
    """Heading and lines of every section."""
    lines = doc.splitlines()
    for at, line in enumerate(lines):
        if line.rstrip(":") in SECTIONS and line.endswith(":") and (at == 0 or not lines[at - 1].strip()):
            rest = lines[at + 1 :]
            length = next((i for i, text in enumerate(rest) if text.strip() and not text.startswith(" ")), len(rest))
            yield line[:-1], [text for text in rest[:length] if text.strip()]


def parameters(function: Function) -> set[str]:
    its = function.args
    return {x.arg for x in (*its.posonlyargs, *its.args, *its.kwonlyargs, its.vararg, its.kwarg) if x is not None}


def attributes(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Names that a class or its bases define, in their bodies or on ``self``."""
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, Function) or (isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Store)):
            names.add(getattr(inner, "name", None) or getattr(inner, "id", None) or getattr(inner, "attr", ""))
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            names |= attributes(classes[base.id], classes)
    return names


def described(node: ast.AST, heading: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    """What entries of a section may name."""
    if not isinstance(node, Documented):
        return set()
    if isinstance(node, Function):
        return parameters(node)
    init = [x for x in node.body if isinstance(x, Function) and x.name == "__init__"]
    return parameters(init[0]) if heading == "Args" and init else attributes(node, classes)


def faults(path: str, text: str, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """What a documentation tool could not read in a file."""
    for node in ast.walk(ast.parse(text)):
        doc = ast.get_docstring(node) if isinstance(node, Documented | ast.Module) else None
        for heading, lines in sections(doc or ""):
            where = f"{path}: {getattr(node, 'name', 'module')}: {heading}:"
            if not lines:
                yield f"{where} nothing"
            if heading in ("Returns", "Yields"):
                continue
            yield from (f"{where} two entries on a line: {line.strip()}" for line in lines if SECOND_ENTRY.search(line.strip()))
            for entry in (line[4:] for line in lines if not line.startswith("     ")):
                name = ENTRY.match(entry)
                if name is None:
                    yield f"{where} not 'name: text': {entry}"
                elif heading != "Raises" and name[1].lstrip("*") not in described(node, heading, classes):
                    yield f"{where} {name[1]} is not there"


def public(sources: dict[str, str]) -> Iterator[tuple[str, Documented]]:
    """Classes and functions that a package lists in ``__all__``, and their public methods; a law's name says it."""
    listed = {
        name.value
        for path, text in sources.items()
        if path.endswith("__init__.py")
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        for name in getattr(node.value, "elts", ())
    }
    for path, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, Documented) and node.name in listed:
                yield path, node
                for inner in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(inner, Function) and not inner.name.startswith(("_", "test_")):
                        yield path, inner


def undocumented(sources: dict[str, str], classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Public objects without a docstring; a method may leave it to the base class that it overrides."""
    documented = {x.name for node in classes.values() for x in node.body if isinstance(x, Function) and ast.get_docstring(x)}
    for path, node in public(sources):
        if ast.get_docstring(node) is None and not (isinstance(node, Function) and node.name in documented):
            yield f"{path}: {node.name} has no docstring"


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {name: path.read_text() for name, path in FILES.items()}


@pytest.fixture(scope="module")
def classes(sources: dict[str, str]) -> dict[str, ast.ClassDef]:
    return {node.name: node for text in sources.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}


def test_sections_name_one_thing_an_entry(sources, classes):
    bad = [fault for path, text in sources.items() if path.split("/")[1] not in NOT_YET for fault in faults(path, text, classes)]
    assert not bad, "\n".join(bad)


def test_public_objects_have_docstrings(sources, classes):
    bad = list(undocumented(sources, classes))
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "entry",
    ["a, b: two names.", "a: one.   b: two.", "a", "c: not a parameter.", "a: one.\n        and more   b: two."],
)
def test_a_planted_fault_is_found(entry):
    text = 'def f(a, b):\n    """Does.\n\n    Args:\n        ENTRY\n    """\n'
    assert list(faults("planted.py", text.replace("ENTRY", entry), {}))
    assert not list(faults("planted.py", text.replace("ENTRY", "a: One.\n        b: Two,\n            and more."), {}))
