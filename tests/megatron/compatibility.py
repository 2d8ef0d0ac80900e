"""Looks up names of other packages that names.md lists."""

import ast
import importlib
import inspect
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([\w.]+):([\w.]+)(?:\(([\w, ]+)\))?` \| ([^|]*) \| ([\d.]*) ?\|$", re.MULTILINE)


def listed(*packages):
    """(module, name, parameters, what for, last version) of each name of these packages in the file."""
    rows = [match.groups(default="") for match in ROW.finditer(Path(__file__).with_name("names.md").read_text())]
    return [row for row in rows if row[0].split(".")[0] in packages]


def fault_of(module, name, parameters, purpose, last):
    """What is wrong with a name in the version that is installed; empty if nothing is."""
    package = {"megatron": "megatron-core"}.get(module.split(".")[0], module.split(".")[0])
    try:
        here = version(package)
    except PackageNotFoundError:
        here = "of another kind"
    if last and tuple(map(int, here.split(".")[:2])) > tuple(map(int, last.split("."))):
        return ""
    gone = f"{module}:{name} is gone from {package} {here}; foremoe needs it for: {purpose}"
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        return f"{gone} ({error})"
    for part in name.split("."):
        owner, found = found, getattr(found, part, None)
        if found is None and not (inspect.isclass(owner) and assigned(owner, part)):
            return gone
    takes = inspect.signature(found).parameters if parameters else {}
    missing = [parameter for parameter in parameters.split(", ") if parameter and parameter not in takes]
    return f"{gone}; it takes no {missing[0]}" if missing else ""


def assigned(cls, name):
    """Whether a class declares a field, or its methods assign the attribute."""
    for base in cls.__mro__[:-1]:
        if name in getattr(base, "__annotations__", {}):
            return True
        own = base.__module__.split(".")[0] in ("megatron", "verl")
        if own and re.search(rf"\bself\.{name}\b[^=\n]*=", inspect.getsource(base)):
            return True
    return False


def imported(package):
    """Names ``module:name`` of a package that files of foremoe's adapters import, with the file."""
    found = {}
    for path in (ROOT / "foremoe" / "integrations").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                for alias in node.names:
                    found[f"{node.module}:{alias.name}"] = path.relative_to(ROOT).as_posix()
    return found


def unlisted(package):
    """Imports that the file does not have; a module counts as listed if any of its names is."""
    known = set()
    for module, name, *_ in listed(package):
        known |= {f"{module}:{name.split('.')[0]}", ":".join(module.rsplit(".", 1))}
    return {name: path for name, path in imported(package).items() if name not in known}
