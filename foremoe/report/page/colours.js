"use strict";
// Viridis for amounts, and a table of colours with one meaning each.

const VIRIDIS = ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"].map((hex) =>
  [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

/** [r, g, b] for a share from 0 to 1. */
function viridis(share) {
  const at = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1), i = Math.min(Math.floor(at), VIRIDIS.length - 2), rest = at - i;
  return VIRIDIS[i].map((low, c) => Math.round(low + rest * (VIRIDIS[i + 1][c] - low)));
}

// Each colour has one meaning, on light and on dark paper. Colours that must be told apart differ enough for readers with any
// colour vision, as checked by tests/report/test_report_colours.py.
const MEANINGS = {
  attention: ["#494fcf", "#0576b7"], // attention
  dispatch: ["#4a88a8", "#49b0fd"], // tokens sent to experts
  compute: ["#51b480", "#a3e49f"], // expert compute
  combine: ["#f6aeff", "#cc4c7e"], // tokens sent back
  weights: ["#f74f2e", "#f67c1e"], // waiting for weights
  gradient: ["#66286d", "#f2c5e6"], // gradients sent home, or waiting for them
  wait: ["#bdc3ca", "#495059"], // waiting for other ranks
  outside: ["#747474", "#b5b5b5"], // head, reduction, optimizer
  moves: ["#683108", "#977a5a"], // homes that move
  peer: ["#e0a030", "#f89f2a"], // copies by peer links
  rdma: ["#1065e3", "#1890fc"], // copies by RDMA
  host: ["#5f5f5f", "#9a9a9a"], // copies from host memory
  held: ["#9ea6ae", "#646d78"], // weights still in their buffer
  planned: ["#4986cf", "#59829c"], // a value as planned
  chosen: ["#f2b705", "#eeb918"], // the chosen rank
  bound: ["#cf291f", "#da1b11"], // a limit: the proven bound, the memory of a rank
  amount: ["#484848", "#d5d5d5"], // a value of no other kind
};
const GROUND = {
  ink: ["#1c1f24", "#e6e9ed"], muted: ["#59616b", "#a4adb8"], grid: ["#dfe3e8", "#343a42"], band: ["#f3f5f7", "#21252b"],
  paper: ["#ffffff", "#181b20"], line: ["#9aa3ad", "#6b7480"],
};
const themeOf = (k) => Object.fromEntries(Object.entries({ ...MEANINGS, ...GROUND }).map(([name, pair]) => [name, pair[k]]));
const LIGHT = themeOf(0), DARK = themeOf(1);

const darkScheme = window.matchMedia("(prefers-color-scheme: dark)");
const themeNow = () => (darkScheme.matches && !printing ? DARK : LIGHT);

/** Coloured squares with names, in as many lines as `room` requires. Returns the group, the width of the last line and the lines. */
function legend(theme, x, y, items, { size = 11, room = Infinity } = {}) {
  const group = svg("g", {});
  let at = x, lines = 1;
  for (const { colour, name, outline = false, line = false } of items) {
    if (at > x && at + 17 + measure(name, size) > x + room) { at = x; y += 16; lines++; }
    if (line) group.append(svg("line", { x1: at, x2: at + 12, y1: y - 4, y2: y - 4, stroke: colour, "stroke-width": 2, "stroke-dasharray": line === "dashed" ? "4 3" : null }));
    else group.append(svg("rect", { x: at + 1, y: y - 9, width: 10, height: 10, fill: outline ? "none" : colour, stroke: outline ? colour : "none", "stroke-width": 1.2 }));
    group.append(label(at + 17, y, name, theme, { size }));
    at += 17 + measure(name, size) + 16;
  }
  return { group, width: at - x, lines };
}
