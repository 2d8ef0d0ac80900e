"use strict";
// Letters: G ranks.

const ROW = { left: 58, right: 112, top: 34, bottom: 34 };

/** The x of a rank's slot in both figures of the chosen row, and its width. */
function rankScale(width, G) {
  const each = (width - ROW.left - ROW.right) / G;
  return { each, x: (g) => ROW.left + g * each, middle: (g) => ROW.left + (g + 0.5) * each };
}

/** Runs of ranks of one node: [first, last, node]. */
function nodeRuns() {
  const runs = [];
  facts.node_of_rank_G.forEach((node, g) => {
    const last = runs[runs.length - 1];
    if (last && last[2] === node) last[1] = g;
    else runs.push([g, g, node]);
  });
  return runs;
}

/** Shaded bands for every other node, and the names of nodes if they fit. */
function nodeBands(theme, scale, top, bottom, labelY) {
  const group = svg("g", {});
  nodeRuns().forEach(([first, last, node], i) => {
    const x = scale.x(first), wide = scale.x(last) + scale.each - x;
    if (i % 2 === 0) group.append(svg("rect", { x, y: top, width: wide, height: bottom - top, fill: theme.band }));
    if (i > 0) group.append(svg("line", { x1: x, x2: x, y1: top, y2: bottom, stroke: theme.grid }));
    const name = wide > measure(`node ${node}`, 10) + 4 ? `node ${node}` : wide > measure(String(node), 10) + 4 ? String(node) : null;
    if (labelY !== null && name !== null) group.append(label(x + wide / 2, labelY, name, theme, { anchor: "middle", size: 10, colour: theme.muted }));
  });
  return group;
}

/** Loads of all ranks before (outline) and after (filled), with the mean and the bound as lines. */
function drawBars(theme, width, { rows, n, rank }) {
  const G = facts.G, { before_G, after_G, mean } = rows.loads(n), bound = rows.arrays.load_bound_ML[n];
  const height = 236, top = ROW.top, bottom = height - ROW.bottom, most = Math.max(...before_G, ...after_G, bound, 1) * 1.02;
  const scale = rankScale(width, G), y = (value) => bottom - value / most * (bottom - top);
  const root = canvasOf(width, height, theme, `Load of ${G} ranks before and after`);
  root.append(nodeBands(theme, scale, top, bottom, bottom + 27));
  root.append(yAxis(theme, { left: ROW.left, right: width - ROW.right, top, bottom, most, name: "(token, expert) pairs" }));
  const inset = Math.min(scale.each * 0.15, 3), wide = Math.max(scale.each - 2 * inset, 0.8);
  for (let g = 0; g < G; g++) {
    const x = scale.x(g) + inset;
    root.append(svg("rect", { x, y: y(after_G[g]), width: wide, height: bottom - y(after_G[g]), fill: g === rank ? theme.chosen : theme.planned, class: "after" }));
    root.append(svg("rect", { x: x + 0.5, y: y(before_G[g]), width: Math.max(wide - 1, 0.3), height: bottom - y(before_G[g]), fill: "none", stroke: theme.ink, "stroke-width": scale.each < 4 ? 0.5 : 1, class: "before" }));
  }
  root.append(svg("line", { x1: ROW.left, x2: width - ROW.right, y1: bottom, y2: bottom, stroke: theme.line }));
  for (const g of indexTicks(G, scale.each, 24)) root.append(label(scale.middle(g), bottom + 14, g, theme, { anchor: "middle", colour: theme.muted }));
  root.append(label(ROW.left - 6, bottom + 14, "rank", theme, { anchor: "end", colour: theme.muted }));
  barLines(root, theme, width, y, mean, bound);
  root.append(legend(theme, width < 560 ? 4 : width - ROW.right - 300, 14, [
    { colour: theme.ink, name: "at home", outline: true }, { colour: theme.planned, name: "planned" },
    { colour: theme.ink, name: "mean", line: "dashed" }, { colour: theme.bound, name: "bound", line: true },
  ]).group);
  return root;
}

/** Mean and lower bound, with their names at the right, which do not overlap. */
function barLines(root, theme, width, y, mean, bound) {
  const edge = width - ROW.right, apart = Math.max(0, 26 - (y(mean) - y(bound))) / 2;
  const lines = [[bound, theme.bound, null, `bound ${whole(bound)}`, y(bound) - apart], [mean, theme.ink, "4 3", `mean ${whole(mean)}`, y(mean) + apart]];
  for (const [value, colour, dash, text, at] of lines) {
    root.append(svg("line", { x1: ROW.left, x2: edge, y1: y(value), y2: y(value), stroke: colour, "stroke-width": 1.4, "stroke-dasharray": dash }));
    root.append(label(edge + 6, at + 4, text, theme));
  }
}

/** Makes bars or arcs choose a rank by pointer and by arrow keys. */
function rankControls(plot, rows, choose, describe) {
  const root = plot.firstChild;
  root.setAttribute("tabindex", "0");
  const rankAt = (event) => {
    const box = root.getBoundingClientRect(), scale = rankScale(box.width, facts.G);
    const g = Math.floor((event.clientX - box.left - ROW.left) / scale.each);
    return g >= 0 && g < facts.G ? g : null;
  };
  root.addEventListener("pointermove", (event) => { const g = rankAt(event); showTip(event, g === null ? "" : describe(g)); });
  root.addEventListener("pointerleave", hideTip);
  root.addEventListener("click", (event) => { const g = rankAt(event); choose(g === state.rank ? null : g); });
  root.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") choose(null);
    if (!step) return;
    event.preventDefault();
    choose(state.rank === null ? 0 : Math.min(Math.max(state.rank + step, 0), facts.G - 1));
  });
}
