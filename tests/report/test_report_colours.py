"""Colours of the page that must be told apart are told apart by readers of any colour vision, on light and dark paper."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as seen.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ_OF_RGB = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
WHITE = [0.95047, 1.0, 1.08883]
# Meanings that stand in one figure, and the least CIEDE2000 between any two of them.
TOGETHER = {
    "activities": (
        10.0,
        ("attention", "dispatch", "compute", "combine", "weights", "gradient", "wait", "outside", "moves"),
    ),
    "links": (15.0, ("peer", "rdma", "host", "held", "gradient")),
    "one row": (15.0, ("planned", "chosen", "bound", "amount")),
}
ANY_TWO, FROM_PAPER = 6.0, 12.0
# Luminance, as WCAG counts it: arcs of copies are thin.
CONTRAST_OF_LINKS = 2.2


def meanings() -> dict[str, tuple[str, str]]:
    text = (files("foremoe.report") / "page" / "colours.js").read_text()
    pairs = re.findall(r'(\w+): \["(#\w{6})", "(#\w{6})"\]', text)
    return {name: (light, dark) for name, light, dark in pairs}


COLOURS = meanings()
KINDS = set(COLOURS) - {"ink", "muted", "grid", "band", "paper", "line"}


def seen(colour: str, vision: str) -> np.ndarray:
    """CIELAB of a colour as a reader of this vision sees it."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.asarray(XYZ_OF_RGB) @ np.clip(np.asarray(VISIONS[vision]) @ linear, 0.0, 1.0) / WHITE
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def ciede2000(one: np.ndarray, other: np.ndarray) -> float:
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean7 = ((np.hypot(a1, b1) + np.hypot(a2, b2)) / 2) ** 7
    stretch = 1.5 - 0.5 * np.sqrt(mean7 / (mean7 + 25**7))
    c1, c2 = np.hypot(a1 * stretch, b1), np.hypot(a2 * stretch, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a * stretch)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = h1 + turn / 2 if c1 * c2 else h1 + h2
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    waves = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    t = 1 + sum(k * np.cos(np.radians(n * hue + at)) for k, n, at in waves)
    of_light = (l2 - l1) / (1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2))
    of_chroma = (c2 - c1) / (1 + 0.045 * chroma)
    of_hue = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)) / (1 + 0.015 * chroma * t)
    rotation = -2 * np.sqrt(chroma**7 / (chroma**7 + 25**7)) * np.sin(np.radians(60 * np.exp(-(((hue % 360 - 275) / 25) ** 2))))
    return float(np.sqrt(of_light**2 + of_chroma**2 + of_hue**2 + rotation * of_chroma * of_hue))


def test_the_difference_is_that_of_published_pairs():
    # From the test data of Sharma, Wu and Dalal 2005.
    assert ciede2000(np.array([50, 2.6772, -79.7751]), np.array([50, 0, -82.7485])) == pytest.approx(2.0425, abs=1e-4)
    assert ciede2000(np.array([50, 2.5, 0]), np.array([73, 25, -18])) == pytest.approx(27.1492, abs=1e-4)
    assert ciede2000(np.array([22.7233, 20.0904, -46.6940]), np.array([23.0331, 14.9730, -42.5619])) == pytest.approx(
        2.0373, abs=1e-4
    )


@pytest.mark.parametrize("paper", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_colours_are_told_apart(vision, paper):
    def apart(a: str, b: str) -> float:
        return ciede2000(seen(COLOURS[a][paper], vision), seen(COLOURS[b][paper], vision))

    for least, names in TOGETHER.values():
        near = {(a, b): apart(a, b) for a, b in combinations(names, 2)}
        assert min(near.values()) >= least, min(near, key=near.__getitem__)
    assert min(apart(name, "paper") for name in KINDS) >= FROM_PAPER


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        return float(np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ XYZ_OF_RGB[1])

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", [0, 1], ids=["light", "dark"])
def test_thin_marks_stand_out_from_the_paper(paper):
    least = {name: contrast(COLOURS[name][paper], COLOURS["paper"][paper]) for name in TOGETHER["links"][1]}
    assert min(least.values()) >= CONTRAST_OF_LINKS, least


@pytest.mark.parametrize("paper", [0, 1], ids=["light", "dark"])
def test_one_meaning_a_colour(paper):
    lab = {name: seen(COLOURS[name][paper], "normal") for name in KINDS}
    assert {name for _, names in TOGETHER.values() for name in names} == KINDS
    assert min(ciede2000(lab[a], lab[b]) for a, b in combinations(sorted(KINDS), 2)) >= ANY_TWO
