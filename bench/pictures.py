"""Draws the pictures of the README and the docs as SVG files, from a plan made by this program and from tables in bench/results.

Needs matplotlib (`pip install '.[docs]'`). Every figure in a picture is computed or read from a table. None is typed in.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import foremoe
from foremoe.simulate import simulate

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
# Colours in daylight, their names, and the same in a dark scheme; data in those of Okabe and Ito.
INK, PAPER, FAINT, BLUE, ORANGE, GREEN = "#1c1f24", "#ffffff", "#8b949e", "#0072b2", "#d55e00", "#009e73"
SCHEME = {
    INK: ("ink", "#e6e9ed"), PAPER: ("paper", "#131416"), FAINT: ("faint", "#7d8590"), BLUE: ("blue", "#56b4e9"),
    ORANGE: ("orange", "#e69f00"), GREEN: ("green", "#2bc49a"),
}  # fmt: skip
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "foremoe", "font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left",
    "hatch.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True,
    "figure.facecolor": PAPER, "axes.facecolor": PAPER,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip

Lines = list[dict[str, str]]


def newest(name: str) -> str:
    """The text of the newest result file of a benchmark."""
    return max((ROOT / "bench" / "results").glob(f"{name}_*.md"), key=lambda path: path.stem[-10:]).read_text()


def tables(text: str, heading: str = "") -> list[Lines]:
    """Tables below a heading, down to the next one of its rank or above, as cells by column; of the whole text without one."""
    if heading:
        rank = heading.index(" ")
        text = re.split(rf"^#{{1,{rank}}} ", text.split(f"{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        head, _, *rest = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines())
        found.append([dict(zip(head, cells, strict=True)) for cells in rest])
    return found


def number(cell: str) -> float:
    """The number that a cell begins with, or the geometric centre of a span ``a to b``."""
    ends = [float(end) for end in re.findall(r"-?\d+(?:\.\d+)?", cell.split("(")[0])]
    return math.prod(ends) ** (1 / len(ends))


def example() -> tuple[foremoe.Problem, foremoe.Plan]:
    """The README's example."""
    trace = foremoe.synthetic_trace("qwen3-30b-a3b", regime="qwen3-like", seed=0)
    work = foremoe.Workload.from_trace(trace, num_ranks=16, tokens_per_rank=2048)
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=16, dispatch="node")
    problem = foremoe.choose_slots(foremoe.Problem.of(work, cluster)).problem
    return problem, foremoe.Planner().plan(problem)[0]


def layer(plt: Any) -> Any:
    """One layer of the README's example: load of every rank at home and as planned; hatched is waiting."""
    _, plan = example()
    m, at = 0, 3
    rank_G = np.arange(plan.G)
    home_E = plan.home_LE[at] // plan.B
    home_G = np.bincount(home_E, plan.load_MLE[m, at], plan.G)
    replicas_GS, quota_GS = plan.expert_MLGS[m, at, :, plan.B :], plan.quota_MLGS[m, at]
    copied_G = quota_GS[:, plan.B :].sum(axis=1)
    taker, slot = np.unravel_index(quota_GS[:, plan.B :].argmax(), replicas_GS.shape)
    expert = int(replicas_GS[taker, slot])
    giver, moved = int(home_E[expert]), int(quota_GS[taker, plan.B + slot])

    figure, (before, after) = plt.subplots(2, 1, figsize=(6, 5), sharex=True, sharey=True)
    for axes, load, copied, name in (
        (before, home_G, np.where(rank_G == giver, moved, 0), "Experts at home"),
        (after, quota_GS.sum(axis=1), copied_G, "As planned"),
    ):
        axes.bar(rank_G, load - copied, color=BLUE, label="computes experts at home")
        axes.bar(rank_G, copied, bottom=load - copied, color=ORANGE, label="computes copies")
        axes.bar(rank_G, load.max() - load, bottom=load, fill=False, edgecolor=FAINT, hatch="////", linewidth=0, label="waits")
        axes.axhline(load.mean(), color=INK, linewidth=0.8, linestyle="--")
        skew = load.max() / load.mean()
        axes.set_title(f"{name}: busiest rank {load.max():,.0f} pairs, {skew:.2f} times the mean")
        axes.set_ylabel("pairs")
        axes.yaxis.set_major_locator(plt.MultipleLocator(5000))
    after.set_xlabel("rank")
    after.set_xticks(rank_G)
    after.legend(loc="upper left", ncols=3, frameon=False, fontsize=9, bbox_to_anchor=(0, 0.98), columnspacing=1.2)
    start, end = (giver + 0.4, home_G[giver] - moved / 2), (taker, quota_GS[taker].sum())
    arrow = {"arrowstyle": "-|>", "color": ORANGE, "linewidth": 1.8, "connectionstyle": "arc3,rad=-0.25", "shrinkA": 0}
    after.annotate("", xy=end, xytext=start, xycoords=after.transData, textcoords=before.transData, arrowprops=arrow)
    before.text(giver + 2.6, start[1] + 600, f"copy of expert {expert}", color=ORANGE, fontweight="bold")
    return figure


def ring(plt: Any) -> Any:
    """The ring of buffers of one rank of the README's example: copies on their way, waiting, and in use."""
    problem, plan = example()
    run, copies = simulate(problem, plan), plan.transfers
    num_uses = 16
    rank = int(np.bincount(copies.dst_C[copies.need_C < num_uses], minlength=plan.G).argmax())
    figure, axes = plt.subplots(figsize=(8, 2.8))
    parts = (("on its way", ORANGE), ("in its buffer", FAINT), ("computes", BLUE))
    for c in np.flatnonzero((copies.dst_C == rank) & (copies.need_C < num_uses)):
        use, buffer = int(copies.need_C[c]), int(copies.buffer_C[c])
        begin_s = run.dispatched_U[use] + run.wait_UG[use, rank]
        times = np.array([run.copy_start_C[c], run.copy_end_C[c], begin_s, run.computed_U[use]]) * 1e3
        for (name, colour), start, end in zip(parts, times[:-1], times[1:], strict=True):
            axes.barh(buffer, end - start, left=start, height=0.6, color=colour, label=name)
        axes.text(times[3], buffer + 0.33, f"layer {int(copies.layer_C[c])}", fontsize=8, ha="right")
    axes.set_yticks(range(int(copies.buffer_C.max()) + 1))
    axes.set_ylabel("buffer")
    axes.set_xlabel("ms since the stage began")
    axes.set_ylim(axes.get_ylim()[0], axes.get_ylim()[1] + 0.6)
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    return figure


def balanced(plt: Any) -> Any:
    """Share of the throughput with forced even routing, by system, on recorded loads and on synthetic ones."""
    (lines,) = tables(newest("throughput"), "## Dispatch node, in short")
    lines = [line for line in lines if "force-balanced" not in line.values()]
    names = [next(iter(line.values())) for line in lines]
    shown = {
        "recorded": ("R1 recorded EP8", "R1 recorded EP16", "R1 recorded EP32", "gpt-oss-20b recorded EP16"),
        "synthetic": ("qwen3-like EP16", "qwen3-like EP64", "r1-like EP64 NVL72", "qwen3-like EP64 NVL72"),
    }
    figure, panels = plt.subplots(2, 1, figsize=(6, 7.4), sharex=True)
    for axes, (title, columns) in zip(panels, shown.items(), strict=True):
        for column, color, marker in zip(columns, (FAINT, BLUE, GREEN, ORANGE), "osD^", strict=True):
            at = [(number(line[column]), y) for y, line in enumerate(lines) if line[column] != "-"]
            axes.plot(*zip(*at, strict=True), marker, color=color, markersize=6, label=column)
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="y", color=FAINT, linewidth=0.4, alpha=0.5)
        axes.invert_yaxis()
        axes.axvline(100, color=INK, linewidth=0.8, linestyle="--")
        axes.set_title(title)
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    panels[1].set_xlabel("% of even routing, dispatch node, simulated")
    return figure


def predicted(plt: Any) -> Any:
    """Simulated against published figures, and predicted against measured stages of the demo."""
    published, validation = newest("published"), tables(newest("validation"))
    panels: list[tuple[str, str, list[tuple[float, float]]]] = []
    rows = [line for line in tables(published)[0] if line["role"] == "check"]
    for title, unit in (("Throughput", "tokens/s/GPU"), ("Bandwidth", "GB/s"), ("Ratios", "ratio")):
        points = [(number(line["published"]), number(line["model"])) for line in rows if line["unit"] == unit]
        panels.append((f"{title}, check rows", "published", points))
    stages = next(lines for lines in validation if "configuration" in lines[0])
    cells = [line[arm].split(" (")[0].split(" -> ") for line in stages for arm in ("static", "foremoe")]
    panels.append(("Stages of the demo", "measured", [(float(x), float(y)) for x, y in cells]))
    units = ("tokens/s/GPU", "GB/s", "ratio", "s")
    figure, grid = plt.subplots(2, 2, figsize=(6, 6))
    for axes, (title, known, points), unit in zip(grid.flat, panels, units, strict=True):
        low, high = min(map(min, points)) / 1.3, max(map(max, points)) * 1.3
        ends = np.array([low, high])
        axes.fill_between(ends, ends / 1.15, ends * 1.15, color=FAINT, alpha=0.25, linewidth=0)
        axes.plot(ends, ends, color=INK, linewidth=0.8)
        axes.plot(*zip(*points, strict=True), "o", color=BLUE, markersize=5, alpha=0.8)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal", title=title)
        axes.set_xlabel(f"{known}, {unit}")
        axes.set_ylabel(f"simulated, {unit}")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(plt.NullLocator())
    return figure


PICTURES: dict[str, Callable[[Any], Any]] = {
    "layer": layer,
    "ring": ring,
    "balanced": balanced,
    "predicted": predicted,
}
# Benchmarks whose newest tables a picture shows.
SOURCES = {
    "layer": (),
    "ring": (),
    "balanced": ("throughput",),
    "predicted": ("published", "validation"),
}


def stamp(name: str) -> str:
    """A digest of the tables that a picture shows; the picture holds it, so that a test finds one that has grown old."""
    return hashlib.sha256("".join(newest(source) for source in SOURCES[name]).encode()).hexdigest()[:16]


def themed(svg: str) -> str:
    """The same picture with colours that follow the reader's scheme, light or dark."""
    for day, (name, _) in SCHEME.items():
        svg = svg.replace(day, f"var(--{name})")
    light, dark = (
        ";".join(f"--{name}:{color}" for color, name in pairs)
        for pairs in ([(day, name) for day, (name, _) in SCHEME.items()], [(night, name) for name, night in SCHEME.values()])
    )
    style = (
        f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}text{{font-family:sans-serif!important}}</style>"
    )
    return re.sub(r"(<svg[^>]*>)", rf"\1{style}", svg, count=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PICTURES), help=f"of {', '.join(PICTURES)}; default: all")
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot, ticker

    for name in ("MultipleLocator", "LogLocator", "NullLocator", "FuncFormatter"):
        setattr(pyplot, name, getattr(ticker, name))
    for name in parser.parse_args().names:
        with pyplot.rc_context(STYLE):
            text = io.StringIO()
            PICTURES[name](pyplot).savefig(
                text, format="svg", metadata={"Date": None, "Creator": None, "Identifier": stamp(name)}
            )
        file = FOLDER / f"{name}.svg"
        file.write_text(themed(text.getvalue()))
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
