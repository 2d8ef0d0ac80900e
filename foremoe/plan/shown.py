"""Display of a plan in a notebook, with its summary and the skew of every layer without and with the plan."""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.shown import table
from foremoe.plan.plan import Plan
from foremoe.plan.text import static_load_MLG, summary
from foremoe.workload.skew import mean_skew

# Letters: K lines of the picture, M micro-steps, L layers, G ranks.

_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 120, 40, 18  # size of the picture in pixels, and its margins
_LINES = (("at home", "#cc6677"), ("planned", "#4477aa"))


def plan_html(plan: Plan) -> str:
    """Returns HTML with the lines of `summary` and a chart of each layer's skew, averaged over the micro-steps."""
    figures: dict[str, str] = {}
    for line in summary(plan).splitlines():
        name, _, text = line.partition(": ") if not line.startswith(" ") else (list(figures)[-1], "", line)
        figures[name] = f"{figures.get(name, '')}{text}"
    load_KMLG = np.stack([static_load_MLG(plan), plan.load_NG.reshape(plan.M, plan.L, plan.G)])
    skew_KL = np.array([[mean_skew(load_MLG[:, layer]) for layer in range(plan.L)] for load_MLG in load_KMLG])
    return table("Plan", figures, _picture(skew_KL))


def _picture(skew_KL: Array) -> str:
    """Returns an SVG with a line for each of `_LINES`. Even load (skew 1) is at the bottom, the largest skew at the top."""
    num = skew_KL.shape[1]
    skew_KL = skew_KL if num > 1 else np.repeat(skew_KL, 2, axis=1)  # a single layer gives a horizontal line
    top, last = max(float(skew_KL.max()), 1.01), max(num - 1, 1)
    parts = []
    for k, (name, colour) in enumerate(_LINES):
        points = " ".join(
            f"{_LEFT + _WIDTH * layer / last:.1f},{_TOP + _HEIGHT * (top - value) / (top - 1):.1f}"
            for layer, value in enumerate(skew_KL[k].tolist())
        )
        parts.append(f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts.append(f"<text x='{_LEFT + 150 * k}' y='12' fill='{colour}'>skew {name}</text>")
    low = _TOP + _HEIGHT
    parts += [f"<text x='4' y='{y + 4}' fill='currentColor'>{value:.2f}</text>" for y, value in ((_TOP, top), (low, 1.0))]
    names = ((_LEFT, "start", "layer 0"), (_LEFT + _WIDTH, "end", f"layer {num - 1}"))[:num]
    parts += [f"<text x='{x}' y='{low + 18}' text-anchor='{at}' fill='currentColor'>{text}</text>" for x, at, text in names]
    size = f"width='{_LEFT + _WIDTH + 10}' height='{low + 26}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-size='12' font-family='sans-serif'>{''.join(parts)}</svg>"
