"use strict";
// Charts of the whole stage. Letters: G ranks, K link classes, L layers.

const PART_NAMES = {
  window_s: ["attention", "attention"], dispatch_s: ["tokens to experts", "dispatch"], compute_s: ["expert compute", "compute"],
  combine_s: ["tokens back", "combine"], transfer_s: ["weights, exposed", "weights"], gradient_s: ["gradients, exposed", "gradient"],
  moves_s: ["homes move", "moves"], outside_s: ["head", "outside"], reduction_s: ["gradient reduction", "outside"], optimizer_s: ["optimizer", "outside"],
  planning_s: ["planning, exposed", "moves"], bubble_s: ["pipeline bubble", "wait"], stage_s: ["stage", "amount"],
};

const total = (parts) => Object.values(parts).reduce((sum, value) => sum + value, 0);
const usedParts = (bars) => Object.entries(PART_NAMES).filter(([part]) => bars.some(({ parts }) => (parts[part] || 0) > 0));

/** The ways of running the stage whose parts are known. */
function stageBars() {
  const how = facts.simulated ? "simulated" : "predicted", runs = facts.simulated ? facts.simulated.parts : facts.parts;
  return Object.entries(runs).map(([name, parts]) => ({ name: name === "balanced" ? "even routing" : name, how, parts }));
}

/** Stage time by part: one stacked bar per way of running the stage. */
function drawParts(theme, width, bars) {
  const used = usedParts(bars), left = 104, right = 64;
  // Parts of the same colour have one entry in the legend.
  const kinds = [...new Set(used.map(([, [, colour]]) => colour))].map((colour) => ({ colour: theme[colour], name: used.filter(([, [, c]]) => c === colour).map(([, [title]]) => title).join(", ") }));
  const names = legend(theme, 8, 14, kinds, { room: width - 16 });
  const each = 34, top = 18 + names.lines * 16, height = top + bars.length * each + 34, totals = bars.map(({ parts }) => total(parts));
  const most = Math.max(...totals, 1e-12), [factor, unit] = unitOf(most, TIME_UNITS), x = (value) => left + value / most * (width - left - right);
  const root = canvasOf(width, height, theme, "Stage time by part");
  for (const value of ticks(0, most / factor, Math.max(2, Math.floor((width - left - right) / 90)))) {
    root.append(svg("line", { x1: x(value * factor), x2: x(value * factor), y1: top - 4, y2: height - 30, stroke: theme.grid }));
    root.append(label(x(value * factor), height - 14, `${value.toLocaleString("en-US")} ${unit}`, theme, { anchor: "middle", colour: theme.muted }));
  }
  bars.forEach(({ name, how, parts }, i) => {
    const y = top + i * each, group = svg("g");
    root.append(label(left - 8, y + 11, name, theme, { anchor: "end", weight: "600" }), label(left - 8, y + 24, how, theme, { anchor: "end", size: 10, colour: theme.muted }));
    let at = 0;
    for (const [part, [title, colour]] of used) {
      const value = parts[part] || 0;
      if (value <= 0) continue;
      const bar = svg("rect", { x: x(at), y, width: x(at + value) - x(at), height: each - 10, fill: theme[colour], stroke: theme.paper, "stroke-width": 0.5 });
      bar.append(svg("title", {}, `${title}: ${seconds(value)}`));
      group.append(bar);
      at += value;
    }
    root.append(group, label(x(at) + 6, y + 16, seconds(totals[i]), theme, { weight: "600" }));
  });
  root.append(names.group);
  return root;
}

const LINK_COLOURS = { peer: "peer", rdma: "rdma", host: "host" };

/** Small charts of a value per rank, one below the other, with a common axis of ranks. */
function drawByRank(theme, width, charts, description, each = 62) {
  const G = facts.G, left = 58, right = 16, gap = 36, height = charts.length * (each + gap) + 26;
  const root = canvasOf(width, height, theme, description), wide = (width - left - right) / G;
  charts.forEach(({ name, values_G, units, colour, line, lineName, most: given = 0 }, i) => {
    const top = 24 + i * (each + gap), bottom = top + each, most = Math.max(...values_G, line || 0, given, 1e-12) * 1.02, [factor, unit] = unitOf(most, units);
    nodeRuns().forEach(([first, last], k) => {
      if (k % 2 === 0) root.append(svg("rect", { x: left + first * wide, y: top, width: (last - first + 1) * wide, height: each, fill: theme.band }));
    });
    const busiest = values_G.indexOf(Math.max(...values_G)), mean = values_G.reduce((a, b) => a + b, 0) / G;
    root.append(yAxis(theme, { left, right: width - right, top, bottom, most, factor, name: "", count: Math.max(3, Math.round(each / 40)) }));
    root.append(label(left, top - 8, name, theme, { weight: "600" }));
    const words = `${unit}; mean ${scaled(mean, units)}, most ${scaled(values_G[busiest], units)} (rank ${busiest})`;
    const room = width - right - left - measure(name) * 1.1 - 12;
    root.append(label(width - right, top - 8, measure(words) < room ? words : unit, theme, { anchor: "end", colour: theme.muted }));
    for (let g = 0; g < G; g++) {
      const high = values_G[g] / most * each;
      root.append(svg("rect", { x: left + (g + 0.12) * wide, y: bottom - high, width: Math.max(wide * 0.76, 0.6), height: high, fill: theme[colour] }));
    }
    if (line) {
      const y = bottom - line / most * each;
      root.append(svg("line", { x1: left, x2: width - right, y1: y, y2: y, stroke: theme.bound, "stroke-width": 1.5 }));
      root.append(label(left + 4, y + 15, lineName, theme, { halo: theme.paper }));
    }
    root.append(svg("line", { x1: left, x2: width - right, y1: bottom, y2: bottom, stroke: theme.line }));
  });
  const bottom = height - 22;
  for (const g of indexTicks(G, wide, 24)) root.append(label(left + (g + 0.5) * wide, bottom, g, theme, { anchor: "middle", colour: theme.muted }));
  root.append(label(left - 6, bottom, "rank", theme, { anchor: "end", colour: theme.muted }));
  return root;
}

function drawLinks(theme, width) {
  const { names, bytes_KG, busy_s_KG } = facts.links, busy = busy_s_KG !== null;
  const charts = names.map((name, k) => ({ name: `${name.replace("rdma", "RDMA")}${busy ? ", time busy" : ""}`, values_G: busy ? busy_s_KG[k] : bytes_KG[k], units: busy ? TIME_UNITS : BYTE_UNITS, colour: LINK_COLOURS[name.split(" ")[0]] }));
  const used = charts.filter(({ values_G }) => values_G.some((value) => value > 0));
  return used.length ? drawByRank(theme, width, used, "Load of links by rank") : sentence(theme, width, "No link transfers weights or gradients of replicas.");
}

function drawMemory(theme, width) {
  const chart = { name: facts.memory.fits === false ? "peak memory, does not fit" : "peak memory", values_G: facts.memory.peak_bytes_G, units: BYTE_UNITS, colour: "planned", line: facts.memory_bytes, lineName: `memory of one rank: ${bytes(facts.memory_bytes)}` };
  return drawByRank(theme, width, [chart], `Peak memory by rank: ${facts.memory.verdict}`, 190);
}

function sentence(theme, width, text) {
  const root = canvasOf(width, 40, theme, text);
  root.append(label(8, 24, text, theme, { colour: theme.muted }));
  return root;
}

/** Mean (bar) and worst (mark) load gap of every layer. */
function drawGap(theme, width, rows) {
  const { M, L } = facts, mean_L = new Float64Array(L), most_L = new Float64Array(L);
  for (let n = 0; n < M * L; n++) { mean_L[n % L] += rows.gap_N[n] / M; most_L[n % L] = Math.max(most_L[n % L], rows.gap_N[n]); }
  const left = 50, right = 12, names = legend(theme, left, 14, [{ colour: theme.planned, name: `mean over micro-steps (of all rows ${percent(facts.headline.gap_mean)})` }, { colour: theme.bound, name: `worst (of all rows ${percent(facts.headline.gap_max)})` }], { room: width - left });
  const top = 26 + 16 * names.lines, height = top + 168, bottom = height - 36, most = Math.max(...most_L, 1e-3) * 1.05, wide = (width - left - right) / L;
  const root = canvasOf(width, height, theme, "Load gap by layer"), y = (value) => bottom - value / most * (bottom - top);
  root.append(yAxis(theme, { left, right: width - right, top, bottom, most, factor: 0.01, name: "load gap, %" }));
  for (let l = 0; l < L; l++) {
    const x = left + l * wide, inset = wide * 0.12;
    root.append(svg("rect", { x: x + inset, y: y(mean_L[l]), width: Math.max(wide - 2 * inset, 0.6), height: bottom - y(mean_L[l]), fill: theme.planned }));
    root.append(svg("rect", { x: x + inset, y: y(most_L[l]) - 1, width: Math.max(wide - 2 * inset, 1), height: 2, fill: theme.bound }));
  }
  root.append(svg("line", { x1: left, x2: width - right, y1: bottom, y2: bottom, stroke: theme.line }));
  for (const l of indexTicks(L, wide, 28)) root.append(label(left + (l + 0.5) * wide, bottom + 14, l, theme, { anchor: "middle", colour: theme.muted }));
  root.append(label((left + width - right) / 2, height - 6, layerAxis(), theme, { anchor: "middle", colour: theme.muted }));
  root.append(names.group);
  return root;
}

/** Horizontal bars with names at the left: [{name, value, text}], and `own`, a colour of its own, where a bar has one. */
function drawNamedBars(theme, width, list, description, colour, axis) {
  const size = 11, left = Math.min(Math.max(...list.map(({ name }) => measure(name, size))) + 16, width * 0.34), right = 110, each = 21, top = axis ? 24 : 8, height = top + list.length * each + 8;
  const root = canvasOf(width, height, theme, description), most = Math.max(...list.map(({ value }) => value), 1e-12);
  if (axis) root.append(label(Math.max(8, Math.min(left, width - 8 - measure(axis))), 13, fitted(axis, width - 16), theme, { colour: theme.muted }));
  list.forEach(({ name, value, text, own }, i) => {
    const y = top + i * each, wide = value / most * (width - left - right), shown = label(left - 8, y + 13, fitted(name, left - 12, size), theme, { anchor: "end", weight: own ? "600" : null });
    shown.append(svg("title", {}, name));
    root.append(shown, svg("rect", { x: left, y: y + 2, width: Math.max(wide, 0.5), height: each - 6, fill: theme[own || colour] }), label(left + wide + 6, y + 13, text, theme));
  });
  return root;
}

/** Stage times of all strategies. The plan of this page has the colour of planned values. */
function drawStrategies(theme, width) {
  const { columns, rows } = facts.strategies, at = (heading) => columns.findIndex((c) => c.heading === heading);
  const column = at("stage"), factor = columns[column]?.unit === "ms" ? 1e-3 : 1;
  const list = rows.filter((row) => row.cells[column] !== null && row.cells[column] !== undefined).map((row) => ({ name: row.name, value: row.cells[column], text: seconds(row.cells[column] * factor), own: row.name === facts.planner.split(", ")[0] ? "planned" : null }));
  if (!list.length) return sentence(theme, width, "No strategy has a stage time.");
  return drawNamedBars(theme, width, list, "Stage time by strategy", "amount", `simulated (${facts.standing}); moves of homes included`);
}

function drawPlanning(theme, width) {
  const { plan_s, levels } = facts.planning, spent = levels.reduce((sum, level) => sum + level.seconds, 0);
  const list = levels.filter((level) => level.seconds > 0).map((level) => ({ name: level.solver, value: level.seconds, text: seconds(level.seconds) }));
  list.push({ name: "checks, bounds, transfers, paths", value: Math.max(plan_s - spent, 0), text: seconds(Math.max(plan_s - spent, 0)) });
  list.push({ name: "whole plan", value: plan_s, text: seconds(plan_s) });
  return drawNamedBars(theme, width, list, "Planning time by level", "amount", `wall time, ${plural(facts.planning.rows, "row")}`);
}
