"""`parse`: reads solvers and planners from the strings of the command line, configuration files, plan headers and tables.

The string is the repr of an object, which consists of calls of known classes with literal arguments. Nothing else is evaluated.
``parse(repr(x)) == x`` holds.
"""

import ast
import dataclasses
import functools
import importlib
import io
import os
import pkgutil
import re
import sys
import tokenize
from typing import Any

from foremoe.base.errors import InputError, did_you_mean
from foremoe.base.extensions import entry_point_names, entry_point_of, load_entry_point

GROUP = "foremoe.solvers"


@functools.cache
def _known() -> dict[str, type]:
    import foremoe.solvers as solvers
    from foremoe.planner.planner import Planner
    from foremoe.problem.cost import CostModel
    from foremoe.problem.foresight import Noisy, Rerouted

    types = [getattr(solvers, name) for name in solvers.__all__]
    types += [Planner, Noisy, Rerouted, CostModel]
    return {t.__name__: t for t in types if isinstance(t, type)}


def parse(text: str, *, builtin: bool = False) -> Any:
    """Returns the object whose repr is `text`.

    The text may name built-in solvers, `Planner`, `Noisy`, `Rerouted` and `CostModel`. It may also name entry points of other
    packages in the group ``foremoe.solvers`` (``"their-name(option=1)"`` or ``"TheirClass(option=1)"``). Names in other modules
    have the form ``"package.module:Class(option=1)"``. Only entry points and modules that the text names are imported.

    Args:
        builtin: Whether to accept only foremoe's own classes, so that untrusted text cannot cause imports.

    Raises:
        InputError: The text contains syntax other than literals and calls, or a name in the text is unknown or cannot be
            imported.

    Example:
        >>> foremoe.parse("Planner(rank=(Quota(min_pairs=64),))").rank
        (Quota(min_pairs=64),)
    """
    try:
        source, names = text.strip(), {}
        entry = source.partition("(")[0].rstrip()
        if not builtin and not entry.isidentifier() and entry in entry_point_names(GROUP):
            # An entry point may have any name, such as my-solver.
            source, names = f"_entry{source[len(entry) :]}", {"_entry": entry}
        return _Reader(text, builtin, names).value(ast.parse(_with_places(source), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError, tokenize.TokenError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{text!r} is not of the form Name(option=value, ...): {error}.") from None


def load_place(place: str) -> Any:
    """Returns the object that ``package.module:name`` names. Raises InputError if it does not exist."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot use solver {place}: {error}; {_near(module, name)}give package.module:name.") from None


def _near(module: str, name: str) -> str:
    """Returns a suggestion for a misspelt module or name. Imports only the module that was named."""
    found = sys.modules.get(module)
    if found is not None:
        return did_you_mean(name, [known for known in dir(found) if not known.startswith("_")])
    parent, _, last = module.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", ()) if parent else [os.getcwd()]
    names = [known.name for known in pkgutil.iter_modules(folders)]
    # If the module exists, the error came from importing it.
    return "" if last in names else did_you_mean(last, names)


def _with_places(text: str) -> str:
    """Returns the text as valid Python syntax. ``module:name`` becomes ``module @ name``, which no valid text contains."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    if any(token.string == "@" for token in tokens):
        raise InputError(f"{text!r} has an @; write a place as package.module:name.")
    return tokenize.untokenize(
        token._replace(string="@") if token.type == tokenize.OP and token.string == ":" else token for token in tokens
    )


def short(value: Any) -> str:
    """Returns the repr of a solver or planner for tables and labels, which leaves out options with their default values."""
    if isinstance(value, tuple):
        return f"({', '.join(short(item) for item in value)}{',' * (len(value) == 1)})"
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return repr(value)
    options = []
    for option in dataclasses.fields(value):
        default = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
        if getattr(value, option.name) != default:
            options.append(f"{option.name}={short(getattr(value, option.name))}")
    return f"{type(value).__name__}({', '.join(options)})"


class _Reader:
    """Builds objects from the syntax tree of one text."""

    def __init__(self, text: str, builtin: bool, names: dict[str, str]) -> None:
        self.text, self.builtin, self.names = text, builtin, names

    def value(self, node: ast.expr) -> Any:
        """Returns the object that an AST node describes."""
        if isinstance(node, ast.Tuple | ast.List):
            values = [self.value(item) for item in node.elts]
            return tuple(values) if isinstance(node, ast.Tuple) else values
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            if isinstance(node.right, ast.Call):
                return self.call(self.at(node.left, node.right.func), node.right)
            return self.at(node.left, node.right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.call(self.known(node.func.id), node)
        try:
            return ast.literal_eval(node)
        except ValueError:
            # The message of literal_eval itself shows the memory address of an AST node.
            shown = f"{ast.unparse(node)} in {self.text!r}"
            raise InputError(f"{shown} is not of the form Name(option=value, ...) with plain values.") from None

    def known(self, name: str) -> Any:
        """Returns the built-in class or the entry point called `name`."""
        if name in _known():
            return _known()[name]
        entry = None if self.builtin else self.names.get(name) or entry_point_of(GROUP, name)
        if entry is None:
            known = ", ".join(sorted(_known()))
            raise InputError(f"{name} in {self.text!r} is unknown; write your own as package.module:{name}(); known are {known}.")
        return load_entry_point(GROUP, entry)

    def at(self, module: ast.expr, name: ast.expr) -> Any:
        """Returns the object at a place in a module."""
        place = f"{ast.unparse(module)}:{ast.unparse(name)}"
        if self.builtin or not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", place):
            raise InputError(f"{place} in {self.text!r} is not a solver of foremoe or a place such as package.module:name.")
        return load_place(place)

    def call(self, found: Any, node: ast.Call) -> Any:
        """Returns a new object of a class, or a copy of an object with other options."""
        name = ast.unparse(node.func)
        arguments = [self.value(argument) for argument in node.args]
        if any(keyword.arg is None for keyword in node.keywords):
            raise InputError(f"{self.text!r} uses **; write the options out.")
        options = {str(keyword.arg): self.value(keyword.value) for keyword in node.keywords}
        if not isinstance(found, type) and not dataclasses.is_dataclass(found):
            what = f"{name} in {self.text!r} is {type(found).__name__}"
            raise InputError(f"{what}, which takes no options; leave the brackets out.")
        try:
            return found(*arguments, **options) if isinstance(found, type) else dataclasses.replace(found, *arguments, **options)
        except TypeError as error:
            known = [field.name for field in dataclasses.fields(found)] if dataclasses.is_dataclass(found) else []
            meant = "".join(did_you_mean(word, known) for word in options if word not in known)
            end = f"; {meant.strip()}" if meant else "."
            raise InputError(f"{name} cannot be made from {self.text!r}: {error}{end}") from None
