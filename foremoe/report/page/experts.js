"use strict";
// Load of every expert in every layer, and the time that other ranks wait for each rank. Letters: L layers, E experts, G ranks.

const BEND = 0.5; // Colours follow the square root, because a few experts have many times the mean load.

/** Load over the layer's mean of the expert at each place [L, E]; places are in the order of homes, rank by rank. */
function expertLoads(rows, m) {
  const { M, L, E } = facts, { load_MLE, home_rank_LE } = rows.arrays, steps = m === null ? [...Array(M).keys()] : [m];
  const order_L = [], load_LE = new Float64Array(L * E);
  for (let l = 0; l < L; l++) {
    const order = [...Array(E).keys()].sort((a, b) => home_rank_LE[l * E + a] - home_rank_LE[l * E + b] || a - b);
    let total = 0;
    order.forEach((e, i) => {
      for (const step of steps) load_LE[l * E + i] += load_MLE[(step * L + l) * E + e];
      total += load_LE[l * E + i];
    });
    for (let i = 0; i < E; i++) load_LE[l * E + i] *= total > 0 ? E / total : 0;
    order_L.push(order);
  }
  return { load_LE, order_L };
}

function drawExperts(theme, width, { loads, row }) {
  const { L, E } = facts, { load_LE } = loads, wide = width - HEAT.left - HEAT.right, high = Math.min(Math.max(E * 1.6, 160), 340), height = HEAT.top + high + HEAT.bottom;
  const most = load_LE.reduce((a, b) => Math.max(a, b), 1), root = canvasOf(width, height, theme, `Load of ${E} experts in ${L} layers`);
  const href = heatImage(E, L, load_LE, most, (i) => (load_LE[(i % L) * E + Math.floor(i / L)] / most) ** BEND);
  root.append(svg("image", { x: HEAT.left, y: HEAT.top, width: wide, height: high, preserveAspectRatio: "none", href, "image-rendering": "pixelated", class: "cells" }));
  for (const l of indexTicks(L, wide / L, 28)) root.append(label(HEAT.left + (l + 0.5) * wide / L, HEAT.top + high + 14, l, theme, { anchor: "middle", colour: theme.muted }));
  for (const g of indexTicks(facts.G, high / facts.G, 14)) root.append(label(HEAT.left - 6, HEAT.top + (g + 0.5) * high / facts.G + 4, g, theme, { anchor: "end", colour: theme.muted }));
  root.append(label(HEAT.left + wide / 2, height - 6, layerAxis(), theme, { anchor: "middle", colour: theme.muted }), label(4, HEAT.top - 7, "home rank", theme, { colour: theme.muted }));
  root.append(heatScale(theme, width - HEAT.right + 12, Math.min(high, 200), { least: 0, most: Math.ceil(most), name: "load / mean", bend: BEND }));
  if (row !== null) root.append(svg("rect", { x: HEAT.left + (row % L) * wide / L - 1, y: HEAT.top - 1, width: wide / L + 2, height: high + 2, fill: "none", stroke: "#ffffff", "stroke-width": 1.5, class: "chosen" }));
  return root;
}

/** Tips of the expert map. A click chooses the layer. */
function expertControls(plot, loads) {
  const root = plot.firstChild, cells = root.querySelector(".cells"), { L, E } = facts;
  const placeAt = (event) => {
    const box = cells.getBoundingClientRect(), l = Math.floor((event.clientX - box.left) / box.width * L), i = Math.floor((event.clientY - box.top) / box.height * E);
    return l >= 0 && l < L && i >= 0 && i < E ? [l, i] : null;
  };
  root.addEventListener("pointermove", (event) => {
    const at = placeAt(event);
    if (at === null) return hideTip();
    const [l, i] = at, e = loads.order_L[l][i];
    showTip(event, `layer ${l} (model layer ${facts.moe_layer_L[l]}), expert ${e} of rank ${rows.arrays.home_rank_LE[l * E + e]}: ${fixed(loads.load_LE[l * E + i], 2)} times the mean`);
  });
  root.addEventListener("pointerleave", hideTip);
  root.addEventListener("click", (event) => { const at = placeAt(event); if (at) choose(Math.floor(state.row / L) * L + at[0]); });
}

function drawLate(theme, width) {
  const { unit, static_G, planned_G } = facts.late, units = unit === "s" ? TIME_UNITS : [[1e6, "M pairs"], [1e3, "k pairs"], [1, "pairs"]], most = Math.max(...static_G, ...planned_G);
  return drawByRank(theme, width, [
    { name: "at home", values_G: static_G, units, colour: "amount", most }, { name: "planned", values_G: planned_G, units, colour: "planned", most },
  ], "Time that other ranks wait for each rank");
}

function expertFigures() {
  const steps = document.getElementById("expert-steps");
  let loads = expertLoads(rows, null);
  figure("experts", (theme, width, paper) => drawExperts(theme, width, { loads, row: paper ? null : state.row }), { afterDraw: (plot) => expertControls(plot, loads), paperWidth: 800 });
  figure("late", drawLate, { paperWidth: 700 });
  const again = () => { loads = expertLoads(rows, steps.checked ? Math.floor(state.row / facts.L) : null); figures.get("experts").redraw(); };
  steps.addEventListener("change", again);
  onChosen.push(() => (steps.checked ? again() : figures.get("experts").redraw()));
}
