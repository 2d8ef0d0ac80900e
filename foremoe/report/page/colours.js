"use strict";
// Viridis for amounts, Okabe-Ito (and a wine red) for kinds: they hold for readers with any colour vision.

const VIRIDIS = ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"].map((hex) =>
  [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

/** [r, g, b] for a share from 0 to 1. */
function viridis(share) {
  const at = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1), i = Math.min(Math.floor(at), VIRIDIS.length - 2), rest = at - i;
  return VIRIDIS[i].map((low, c) => Math.round(low + rest * (VIRIDIS[i + 1][c] - low)));
}

const KINDS = {
  attention: "#0072B2", dispatch: "#56B4E9", compute: "#009E73", combine: "#CC79A7", weights: "#D55E00",
  peer: "#E69F00", blue: "#0072B2", sky: "#56B4E9", green: "#009E73", pink: "#CC79A7", red: "#D55E00", orange: "#E69F00",
};
const LIGHT = {
  ...KINDS, ink: "#1c1f24", muted: "#59616b", grid: "#dfe3e8", band: "#f3f5f7", paper: "#ffffff", line: "#9aa3ad",
  wait: "#c9cfd6", rdma: "#C9B400", host: "#4d545c", held: "#a7afb8", gradient: "#882255", outside: "#e9ecef",
};
const DARK = {
  ...KINDS, ink: "#e6e9ed", muted: "#a4adb8", grid: "#343a42", band: "#21252b", paper: "#181b20", line: "#6b7480",
  wait: "#4a515a", rdma: "#F0E442", host: "#c3cad2", held: "#666f7a", gradient: "#C06FB5", outside: "#262b31",
};

const darkScheme = window.matchMedia("(prefers-color-scheme: dark)");
const themeNow = () => (darkScheme.matches ? DARK : LIGHT);

const rgbOf = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** Coloured squares with names, in as many lines as `room` asks for; returns the group, the width of the last line and the lines. */
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
