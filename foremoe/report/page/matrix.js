"use strict";
// The replicas of one row by node, for rows with too many arcs between ranks. Letters: V nodes (or blocks of ranks).

const MAX_ARC_RANKS = 32, MAX_BLOCKS = 16;

/** The block of every rank and the names of the blocks, which are nodes, or ranges of ranks if all are on one node. */
function blocksOfRanks() {
  if (facts.num_nodes > 1) return { block_G: facts.node_of_rank_G, names: [...Array(facts.num_nodes).keys()].map(String), what: "node" };
  const each = Math.ceil(facts.G / MAX_BLOCKS), count = Math.ceil(facts.G / each);
  return { block_G: facts.node_of_rank_G.map((_, g) => Math.floor(g / each)), names: [...Array(count).keys()].map((b) => `${b * each}-${Math.min((b + 1) * each, facts.G) - 1}`), what: "ranks" };
}

function drawMatrix(theme, width, { rows, n, rank }) {
  const { block_G, names, what } = blocksOfRanks(), V = names.length, list = rows.replicas(n), pairs_VV = new Float64Array(V * V), copies_VV = new Int32Array(V * V);
  for (const { home, rank: to, quota } of list) {
    pairs_VV[block_G[home] * V + block_G[to]] += quota;
    copies_VV[block_G[home] * V + block_G[to]]++;
  }
  const left = 58, right = 90, top = 42, each = Math.max(Math.min((width - left - right) / V, 44), 4), high = Math.min(each, 26), height = top + V * high + 14;
  const root = canvasOf(width, height, theme, `${list.length} replicas by ${what} of their home and of the rank that serves them`), most = Math.max(...pairs_VV, 1);
  root.append(label(left, 12, `to ${what}`, theme, { colour: theme.muted }), label(2, top - 6, `from ${what}`, theme, { colour: theme.muted }));
  for (const v of indexTicks(V, each, Math.max(...names.map((name) => measure(name))) + 6)) root.append(label(left + (v + 0.5) * each, top - 6, names[v], theme, { anchor: "middle", colour: theme.muted }));
  for (const v of indexTicks(V, high, 14)) root.append(label(left - 6, top + (v + 0.5) * high + 4, names[v], theme, { anchor: "end", colour: theme.muted }));
  for (let i = 0; i < V * V; i++) {
    const share = pairs_VV[i] / most, x = left + (i % V) * each, y = top + Math.floor(i / V) * high;
    const cell = svg("rect", { x, y, width: each - 1, height: high - 1, fill: pairs_VV[i] ? `rgb(${viridis(share).join(",")})` : theme.band, class: "cell" });
    cell.append(svg("title", {}, `${what} ${names[Math.floor(i / V)]} to ${names[i % V]}: ${plural(copies_VV[i], "copy").replace("copys", "copies")}, ${whole(pairs_VV[i])} pairs`));
    root.append(cell);
    const text = String(copies_VV[i]);
    if (copies_VV[i] && measure(text, 10) < each - 2 && high > 11) root.append(label(x + (each - 1) / 2, y + high / 2 + 3, text, theme, { anchor: "middle", size: 10, colour: share > 0.6 ? "#000000" : "#ffffff" }));
  }
  if (rank !== null) {
    const at = { fill: "none", stroke: theme.chosen, "stroke-width": 2 }, v = block_G[rank];
    root.append(svg("rect", { x: left - 1, y: top + v * high - 1, width: V * each + 1, height: high + 1, ...at }), svg("rect", { x: left + v * each - 1, y: top - 1, width: each + 1, height: V * high + 1, ...at }));
  }
  root.append(heatScale(theme, left + V * each + 14, Math.max(V * high - (HEAT.top - 20), 40), { least: 0, most, name: "pairs" }));
  return root;
}
