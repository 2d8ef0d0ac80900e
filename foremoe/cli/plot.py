"""``--plot`` of ``foremoe ablate``: draws speed-ups as bars with matplotlib."""

import importlib.util
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foremoe.base.errors import InputError, file_errors

if TYPE_CHECKING:
    from foremoe.cli.ablated import Bar

_LINE_INCHES, _WIDTH_INCHES = 0.22, 8.0
_LABEL, _TITLE = 40, 110  # numbers of letters per line


def require_matplotlib() -> None:
    """Raises InputError if matplotlib is missing, before anything is planned."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib; pip install matplotlib.")


def plot(path: str, bars: "Sequence[Bar]", title: str) -> str:
    """Draws the bars with their spreads over seeds, and returns a line that names the file.

    Raises:
        InputError: The file cannot be written, or matplotlib does not know its suffix.
    """
    from matplotlib.figure import Figure

    labels = [textwrap.fill(bar.label, _LABEL) for bar in bars]
    num_lines = sum(label.count("\n") + 1.5 for label in labels)
    figure = Figure(figsize=(_WIDTH_INCHES, 1.4 + _LINE_INCHES * num_lines), layout="constrained")
    axes = figure.subplots()
    spreads = [bar.spread for bar in bars] if any(bar.spread for bar in bars) else None
    axes.barh(labels, [bar.gain for bar in bars], xerr=spreads, color="#4477aa", ecolor="black", capsize=3)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("simulated speed-up over static placement")
    figure.suptitle(textwrap.fill(title, _TITLE), fontsize="small")
    with file_errors(path, "write", "give --plot a name such as ablation.svg in a folder that can be written"):
        figure.savefig(path)
    return f"wrote {path}"
