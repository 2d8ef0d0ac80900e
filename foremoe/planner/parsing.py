"""`parse`: one string form for solvers and planners on the command line, in configuration files, plan headers and tables.

The form is the repr: calls of known classes with literal arguments, so ``parse(repr(x)) == x``. Nothing else is evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from typing import Any

from foremoe.base.errors import InputError
from foremoe.base.extensions import entry_point_names, load_entry_point


@functools.cache
def _known() -> dict[str, type]:
    import foremoe.solvers as solvers
    from foremoe.planner.planner import Planner
    from foremoe.problem.cost import CostModel
    from foremoe.problem.foresight import Noisy
    from foremoe.problem.slots import ResidentSlots, SharedSlots

    types = [getattr(solvers, name) for name in solvers.__all__]
    types += [Planner, Noisy, CostModel, SharedSlots, ResidentSlots]
    return {t.__name__: t for t in types if isinstance(t, type)}


def parse(text: str, *, builtin: bool = False) -> Any:
    """The object whose repr is `text`.

    Knows the built-in solvers, `Planner`, `Noisy`, `CostModel`, the slot policies, and solver classes that third parties
    register under the entry-point group ``foremoe.solvers``.

    Args:
        builtin: know foremoe's own classes only: nothing is imported for a text of unknown origin.

    Raises:
        InputError: the text is not literals and calls, or names an unknown class or option.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, text, builtin)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{text!r} is not of the form Name(option=value, ...): {error}.") from None


def short(value: Any) -> str:
    """The repr of a solver or planner without the options that have their default: for tables and labels."""
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


def _value(node: ast.expr, text: str, builtin: bool) -> Any:
    if isinstance(node, ast.Tuple | ast.List):
        values = [_value(item, text, builtin) for item in node.elts]
        return tuple(values) if isinstance(node, ast.Tuple) else values
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        found: Any = _known().get(name)
        if found is None and not builtin:
            for entry in entry_point_names("foremoe.solvers"):
                loaded = load_entry_point("foremoe.solvers", entry)
                if name in (getattr(loaded, "__name__", None), type(loaded).__name__):
                    found = loaded if isinstance(loaded, type) else type(loaded)
        if found is None:
            raise InputError(f"{name} in {text!r} is unknown; known are {', '.join(sorted(_known()))}.")
        arguments = [_value(argument, text, builtin) for argument in node.args]
        if any(keyword.arg is None for keyword in node.keywords):
            raise InputError(f"{text!r} uses **; write the options out.")
        options = {str(keyword.arg): _value(keyword.value, text, builtin) for keyword in node.keywords}
        try:
            return found(*arguments, **options)
        except TypeError as error:
            raise InputError(f"{name} cannot be made from {text!r}: {error}.") from None
    try:
        return ast.literal_eval(node)
    except ValueError:
        # literal_eval's own message shows the address of a syntax node.
        raise InputError(
            f"{ast.unparse(node)} in {text!r} is not of the form Name(option=value, ...) with plain values."
        ) from None
