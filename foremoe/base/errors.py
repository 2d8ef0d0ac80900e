"""Errors that foremoe raises for bad input, for plans that violate a law, and for failed transfers."""

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping


def printable(text: str) -> str:
    """Returns `text` as one line, with control, escape and other non-printing characters escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# A shorter part of a name is in many names by chance.
_LEAST_PART, _MOST_MEANT = 3, 4


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns ``did you mean 'quota'? `` if one of `names` is close, or else an empty string.

    Names that begin with `name` are closest, then names that contain it, then names of a similar spelling.
    """
    word, known = name.strip().lower(), list(names)
    longer = [other for other in known if word in other.lower()] if len(word) >= _LEAST_PART else []
    close = [other for other in longer if other.lower().startswith(word)] or longer or difflib.get_close_matches(word, known, n=1)
    if not close:
        return ""
    *others, last = [repr(other) for other in close[:_MOST_MEANT]]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}? "


_LONGEST = 2000


def _sentence(message: str) -> str:
    # A message may quote the content of a file.
    line = printable(message[: _LONGEST + 1])
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


class Error(Exception):
    """Base class of all errors that foremoe raises: `InputError`, `PlanError`, `TransferError` and `StaleWeights`."""


class InputError(Error, ValueError):
    """Raised for bad input from the caller. The message is one sentence with the numbers and a remedy."""

    def __init__(self, message: str = "") -> None:
        super().__init__(_sentence(message))


class PlanError(Error, ValueError):
    """Raised if a plan violates a law. The laws are listed in docs/plan-format.md.

    Args:
        law: Name of the law, such as ``tokens``, ``homes``, ``canonical``, ``quota``, ``residency`` or ``buffers``.
        where: Location of the violation, such as ``"micro-step 3, layer 7, rank 2"``.
    """

    def __init__(self, law: str, where: str, message: str) -> None:
        self.law, self.where, self.message = law, _sentence(where), _sentence(message)
        super().__init__(f"[{law}] {self.where}: {self.message}" if where else f"[{law}] {self.message}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.law, self.where, self.message)


class TransferError(Error, RuntimeError):
    """Raised if weights, gradients or tokens did not arrive. The step cannot continue, and its result must not be used.

    Args:
        message: One sentence with the numbers and a remedy.
        ranks: Ranks of the EP group that caused the failure, if known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class StaleWeights(TransferError):
    """Raised if weights changed after a plan began and before they were copied, because the optimizer stepped in between."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of the error's type if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def reason(error: BaseException) -> str:
    """Returns an error's type and the first line of its message, for a log and for other ranks."""
    return _sentence(f"{type(error).__name__}: {first_line(error)}")


@contextlib.contextmanager
def naming(where: str, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Adds `where` before the message of an `InputError` in the block, and replaces field names in it according to `names`."""
    try:
        yield
    except InputError as error:
        text = str(error)
        for ours, theirs in (names or {}).items():
            text = re.sub(rf"\b{ours}\b", theirs, text)
        raise InputError(f"{where}: {text}") from None


@contextlib.contextmanager
def file_errors(path: str | os.PathLike[str], verb: str, cure: str) -> Iterator[None]:
    """Converts operating-system errors about a file or its name, raised in the block, to an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot {verb} {os.fspath(path)!r} ({reason}); {cure}.") from None
