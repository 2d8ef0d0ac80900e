"use strict";
// Letters: M micro-steps, L layers, N = M*L rows.

const heatImages = new WeakMap();
const HEAT = { left: 44, right: 78, top: 20, bottom: 36 };

/** Colours of a table of shares (0 to 1) as a bitmap with whole pixels per cell, so that no renderer blurs the edges of cells. */
function heatImage(lines, columns, values, most, shareOf) {
  // A step of the arrow keys draws the same maps again, and creating the bitmaps takes most of the time.
  const kept = heatImages.get(values);
  if (kept?.most === most) return kept.href;
  const px = Math.max(1, Math.min(8, Math.floor(1600 / columns))), py = Math.max(1, Math.min(8, Math.floor(1200 / lines)));
  const canvas = html("canvas", { width: columns * px, height: lines * py }), context = canvas.getContext("2d");
  for (let n = 0; n < lines * columns; n++) {
    const [r, g, b] = viridis(shareOf(n));
    context.fillStyle = `rgb(${r},${g},${b})`;
    context.fillRect((n % columns) * px, Math.floor(n / columns) * py, px, py);
  }
  heatImages.set(values, { most, href: canvas.toDataURL("image/png") });
  return heatImages.get(values).href;
}

/** A map of skew. The colour scale goes from `least` to `most`; `chosen` is a row or null. */
function drawHeat(theme, width, { values_N, least, most, chosen, name, unit }) {
  const { M, L } = facts, wide = width - HEAT.left - HEAT.right;
  const high = Math.max(M > 32 ? Math.min(M * 9, 380) : Math.min(M * 22, 288), 26), height = HEAT.top + high + HEAT.bottom;
  const root = canvasOf(width, height, theme, `Skew ${name}, ${M} micro-steps by ${L} layers`);
  root.append(svg("image", { x: HEAT.left, y: HEAT.top, width: wide, height: high, preserveAspectRatio: "none", href: heatImage(M, L, values_N, most, (n) => (most > least ? (values_N[n] - least) / (most - least) : 0)), "image-rendering": "pixelated", "data-cells": M * L, class: "cells" }));
  for (const l of indexTicks(L, wide / L, 28)) {
    root.append(label(HEAT.left + (l + 0.5) * wide / L, HEAT.top + high + 14, l, theme, { anchor: "middle", colour: theme.muted }));
  }
  for (const m of indexTicks(M, high / M, 16)) {
    root.append(label(HEAT.left - 6, HEAT.top + (m + 0.5) * high / M + 4, m, theme, { anchor: "end", colour: theme.muted }));
  }
  root.append(label(HEAT.left + wide / 2, height - 6, layerAxis(), theme, { anchor: "middle", colour: theme.muted }));
  root.append(label(4, HEAT.top - 7, "micro-step", theme, { colour: theme.muted }));
  root.append(heatScale(theme, width - HEAT.right + 12, Math.min(high, 200), { least, most, name: unit }));
  if (chosen !== null) {
    const cw = wide / L, ch = high / M, x = HEAT.left + (chosen % L) * cw, y = HEAT.top + Math.floor(chosen / L) * ch;
    // Black inside white stays visible on every colour of the map.
    root.append(svg("rect", { x: x - 2.5, y: y - 2.5, width: cw + 5, height: ch + 5, fill: "none", stroke: "#ffffff", "stroke-width": 1.5, class: "chosen" }));
    root.append(svg("rect", { x: x - 1, y: y - 1, width: cw + 2, height: ch + 2, fill: "none", stroke: "#000000", "stroke-width": 1.5 }));
  }
  return root;
}

/** Colour bar from `least` to `most`; `bend` is the power that colours follow, 1 for even steps. */
function heatScale(theme, x, high, { least, most, name, bend = 1 }) {
  const group = svg("g", {}), strips = 64, top = HEAT.top, span = most - least;
  for (let i = 0; i < strips; i++) {
    group.append(svg("rect", { x, y: top + high * (1 - (i + 1) / strips), width: 10, height: high / strips + 0.5, fill: `rgb(${viridis((i + 0.5) / strips).join(",")})` }));
  }
  const at = (value) => (span > 0 ? ((value - least) / span) ** bend : 0);
  // The lower end always has a label. A round number too close to another label would overlap.
  const marks = [least];
  for (const value of span > 1e-4 ? ticks(least, most, Math.max(1, Math.min(5, Math.floor(high / 24)))) : []) {
    if ((at(value) - at(marks[marks.length - 1])) * high > 13) marks.push(value);
  }
  for (const value of marks) {
    const y = top + high * (1 - at(value));
    group.append(svg("line", { x1: x + 10, x2: x + 13, y1: y, y2: y, stroke: theme.muted }));
    group.append(label(x + 16, y + 4, value.toLocaleString("en-US"), theme, { colour: theme.muted }));
  }
  group.append(label(x - 8, top - 7, name, theme, { colour: theme.muted }));
  return group;
}

/** Makes a drawn map choose rows by pointer and arrow keys. */
function heatControls(plot, rows, choose) {
  const root = plot.firstChild, cells = root.querySelector(".cells");
  root.setAttribute("tabindex", "0");
  const rowAt = (event) => {
    const box = cells.getBoundingClientRect();
    const l = Math.floor((event.clientX - box.left) / box.width * facts.L), m = Math.floor((event.clientY - box.top) / box.height * facts.M);
    return l >= 0 && l < facts.L && m >= 0 && m < facts.M ? m * facts.L + l : null;
  };
  root.addEventListener("pointermove", (event) => {
    const n = rowAt(event);
    showTip(event, n === null ? "" : `${rowName(n)}: skew ${fixed(rows.before_N[n], 3)} → ${fixed(rows.after_N[n], 3)}`);
  });
  root.addEventListener("pointerleave", hideTip);
  root.addEventListener("click", (event) => { const n = rowAt(event); if (n !== null) choose(n); });
  root.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const m = Math.floor(state.row / facts.L) + step[0], l = (state.row % facts.L) + step[1];
    if (m >= 0 && m < facts.M && l >= 0 && l < facts.L) choose(m * facts.L + l);
  });
}
