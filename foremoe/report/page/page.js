"use strict";
// Puts the page together: words at the top, figures, and the row that all of them show.

const state = { row: 0, rank: null };
let rows = null;
// Called after a row or rank was chosen.
const onChosen = [];
const ROW_LINK = /^#(?:part=\d+&)?row=(\d+),(\d+)(?:&rank=(\d+))?$/;

/** Shows text with the words between backticks as code. */
const marked = (text) => text.split("`").map((part, i) => (i % 2 ? html("code", {}, part) : part));

function headWords() {
  const h = facts.headline, moves_s = facts.moves ? facts.moves.seconds : 0, planned_s = h.planned_s + moves_s, speed = planned_s > 0 ? h.static_s / planned_s : 1;
  const moving = facts.moves ? ", moves of homes included" : "", v = facts.verdict;
  document.getElementById("title").textContent = [facts.model, `${facts.stage} stage`, partWords()].filter(Boolean).join(", ");
  const badges = [facts.standing];
  if (facts.simulated) badges.push("simulated");
  if (facts.waited_s !== null) badges.push("waits measured");
  if (facts.moves) badges.push(`homes moved first: ${plural(facts.moves.experts, "expert")}, ${seconds(moves_s)}`);
  if (!facts.executable) badges.push("homes move: scored, never executed");
  document.getElementById("badges").append(...badges.map((text) => html("span", { class: "badge" }, text)));
  Object.assign(document.getElementById("verdict").dataset, { gains: v.gains, fits: v.fits });
  document.getElementById("verdict").append(html("strong", {}, v.gain), html("span", {}, ...marked(v.details.join(" "))), html("span", { class: "muted" }, ...marked(v.sure)));
  const about = [
    `${plural(facts.G, "rank")} of ${facts.cluster} on ${plural(facts.num_nodes, "node")}`, `${plural(facts.M, "micro-step")} × ${plural(facts.L, "layer")}`,
    plural(facts.E, "expert"), `R = ${facts.R}, slot depth ${facts.slot_depth}`, `objective ${facts.objective}`, `planner ${facts.planner}`,
  ];
  document.getElementById("about").textContent = about.filter(Boolean).join(" · ");
  document.getElementById("made").append(...[facts.source, facts.date, `foremoe ${facts.version}`].filter(Boolean).join(" · "), ...(facts.command ? [" · ", html("code", {}, facts.command)] : []));
  const stage = () => {
    if (!facts.simulated) return ["stage, predicted", change(h.static_s, planned_s), `${fixed(speed, 2)} x, ${facts.standing}${moving}`];
    const { static_s, planned_s: simulated_s, speedup_vs_static: speedup } = facts.simulated.gains;
    return ["stage, simulated", change(static_s, simulated_s), `${fixed(speedup, 2)} x, ${facts.standing}${moving}`];
  };
  const tiles = [
    ["skew, mean", `${fixed(h.before.mean, 3)} → ${fixed(h.after.mean, 3)}`, `p99 ${fixed(h.before.p99, 2)} → ${fixed(h.after.p99, 2)}`],
    ["skew, worst", `${fixed(h.before.max, 3)} → ${fixed(h.after.max, 3)}`, "at home → planned"],
    stage(),
    ["replicas per rank", h.replicas_per_rank === null ? "-" : fixed(h.replicas_per_rank, 2), `mean of a row, R = ${facts.R}`],
    ["copies and gradients", bytes(h.bytes.peer + h.bytes.rdma + h.bytes.host), `peer ${bytes(h.bytes.peer)}, RDMA ${bytes(h.bytes.rdma)}, host ${bytes(h.bytes.host)}`],
    ["load gap, mean", percent(h.gap_mean), `worst ${percent(h.gap_max)}; above the proven bound`],
  ];
  if (facts.planning) tiles.push(["planning", seconds(facts.planning.plan_s), `${plural(facts.planning.rows, "row")}, wall time`]);
  document.getElementById("tiles").append(...tiles.map(([name, value, words]) => html("div", {}, html("dt", {}, name), html("dd", {}, value), html("dd", { class: "small" }, words))));
  document.title = `foremoe report: ${facts.model}, ${facts.stage}`;
  document.getElementById("foot").textContent = `foremoe ${facts.version}. Times marked "predicted" come from the cost model with the cluster's figures (${facts.cluster_source}). This page contains all its data and opens no connection.`;
}

function contentsWords() {
  const links = [...document.querySelectorAll("main > section:not([hidden])")].map((section) => html("a", { href: `#${section.id}` }, section.dataset.title));
  document.getElementById("contents").append(...links);
}

function choose(n) {
  state.row = n;
  remember();
}

function chooseRank(rank) {
  state.rank = rank;
  remember();
}

/** The part of the page's address that opens it on the chosen row and rank. */
const rowLink = () => `#${job === null ? "" : `part=${shownPart}&`}row=${Math.floor(state.row / facts.L)},${state.row % facts.L}${state.rank === null ? "" : `&rank=${state.rank}`}`;

function remember() {
  history.replaceState(null, "", rowLink());
  update();
}

/** Takes row and rank from the page's address. Returns false if they do not exist. */
function chosenByAddress() {
  const [, m, l, rank] = (location.hash.match(ROW_LINK) || []).map(Number);
  if (!(m < facts.M && l < facts.L)) return false;
  state.row = m * facts.L + l;
  state.rank = rank < facts.G ? rank : null;
  return true;
}

/** Redraws what depends on the chosen row or rank. */
function update() {
  const { row: n, rank } = state, m = Math.floor(n / facts.L), l = n % facts.L;
  document.getElementById("choose-m").value = m;
  document.getElementById("choose-l").value = l;
  document.getElementById("choose-rank").value = rank === null ? "" : String(rank);
  const a = rows.arrays, { before_G, after_G } = rows.loads(n);
  document.getElementById("row-link").href = rowLink();
  document.getElementById("row-words").textContent = `${rowName(n)}: skew ${fixed(rows.before_N[n], 3)} → ${fixed(rows.after_N[n], 3)}; busiest rank ${whole(Math.max(...before_G))} → ${whole(Math.max(...after_G))} pairs; ` +
    `load gap ${percent(rows.gap_N[n])}; predicted ${change(a.static_s_ML[n], a.planned_s_ML[n])}`;
  const reason = rows.reason(n);
  document.getElementById("replicas").replaceChildren(...(reason === null ? [replicaTable(rows, n, rank)] : [html("p", { class: "reason" }, reason)]));
  for (const id of ["heat-removed", "heat-after", "bars", "arcs"]) figures.get(id).redraw();
  for (const act of onChosen) act();
}

function rowControls() {
  const byM = document.getElementById("choose-m"), byL = document.getElementById("choose-l"), byRank = document.getElementById("choose-rank");
  byM.max = facts.M - 1;
  byL.max = facts.L - 1;
  byRank.append(html("option", { value: "" }, "none"), ...facts.node_of_rank_G.map((node, g) => html("option", { value: g }, `${g} (node ${node})`)));
  const take = () => {
    const [m, l] = [[byM, facts.M], [byL, facts.L]].map(([input, count]) => Math.min(Math.max(Math.round(Number(input.value)) || 0, 0), count - 1));
    choose(m * facts.L + l);
  };
  byM.addEventListener("change", take);
  byL.addEventListener("change", take);
  byRank.addEventListener("change", () => chooseRank(byRank.value === "" ? null : Number(byRank.value)));
  document.getElementById("choose-worst").addEventListener("click", () => choose(rows.worst(rows.before_N)));
  document.getElementById("choose-worst-after").addEventListener("click", () => choose(rows.worst(rows.after_N)));
}

function rankWords(g) {
  const { before_G, after_G } = rows.loads(state.row), list = rows.replicas(state.row);
  const held = list.filter((r) => r.rank === g).map((r) => `+ ${whole(r.quota)} of expert ${r.expert} from rank ${r.home}`);
  const given = list.filter((r) => r.home === g).map((r) => `− ${whole(r.quota)} of expert ${r.expert} to rank ${r.rank}`);
  return [`rank ${g}, node ${facts.node_of_rank_G[g]}: ${whole(before_G[g])} → ${whole(after_G[g])} pairs`, ...held.slice(0, 6), ...given.slice(0, 6)].join("\n");
}

function rowFigures() {
  const removed_N = rows.before_N.map((before, n) => before - rows.after_N[n]);
  for (const [id, values_N, even, name, unit] of [["heat-removed", removed_N, 0, "removed", "removed"], ["heat-after", rows.after_N, 1, "planned", "max / mean"]]) {
    const [least, most] = [Math.min, Math.max].map((pick) => values_N.reduce((a, b) => pick(a, b), even));
    figure(id, (theme, width, paper) => drawHeat(theme, width, { values_N, least, most, name, unit, chosen: paper ? null : state.row }),
      { afterDraw: (plot) => heatControls(plot, rows, choose), paperWidth: 700 });
  }
  const few = facts.G <= MAX_ARC_RANKS;
  if (!few) document.querySelector("#arcs figcaption").firstChild.textContent = `Copies by ${blocksOfRanks().what}: their number, with the moved pairs as colour`;
  for (const [id, draw] of [["bars", drawBars], ["arcs", few ? drawArcs : drawMatrix]]) {
    const afterDraw = draw === drawMatrix ? () => {} : (plot) => rankControls(plot, rows, chooseRank, rankWords);
    figure(id, (theme, width) => draw(theme, width, { rows, n: state.row, rank: state.rank }), { afterDraw });
  }
}

function stageFigures() {
  const bars = stageBars();
  figure("parts", (theme, width) => drawParts(theme, width, bars), { paperWidth: 700 });
  document.getElementById("parts-table").append(partsTable(bars));
  figure("links", drawLinks, { paperWidth: 700 });
  figure("memory", drawMemory, { paperWidth: 700 });
  figure("gap", (theme, width) => drawGap(theme, width, rows), { paperWidth: 700 });
  document.querySelector("#links figcaption").firstChild.textContent = facts.links.busy_s_KG ? "Time for which every rank's links are busy (simulated)" : "Bytes of replica weights and gradients over every rank's links";
  if (facts.planning) {
    figure("planning", drawPlanning, { paperWidth: 700 });
    document.getElementById("planning-table").append(planningTable(facts.planning), ...facts.planning.warnings.map((text) => html("p", { class: "note" }, text)));
  } else document.getElementById("planning").hidden = document.getElementById("planning-table").hidden = true;
  if (facts.strategies) {
    figure("strategies", drawStrategies);
    document.getElementById("strategy-table").append(...strategyTable(facts.strategies));
  }
  if (facts.changes) document.getElementById("changes-table").append(changesTable(facts.changes));
}

async function open() {
  headWords();
  rows = new Rows(await readArrays());
  for (const [id, value] of [["job", job], ["compared", facts.strategies], ["changes", facts.changes]]) document.getElementById(id).hidden = !value;
  contentsWords();
  rowControls();
  const linked = chosenByAddress();
  if (!linked) state.row = rows.worst(rows.before_N);
  if (job) jobFigures();
  rowFigures();
  update();
  expertFigures();
  stageFigures();
  if (linked) document.getElementById("row").scrollIntoView();
  window.addEventListener("hashchange", () => {
    if ((partByAddress() ?? shownPart) !== shownPart) location.reload();
    else if (chosenByAddress()) update();
  });
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; redrawAll(); } });
  darkScheme.addEventListener("change", redrawAll);
  document.body.dataset.ready = "yes";
}

open().catch((error) => {
  const trouble = document.getElementById("trouble");
  trouble.textContent = error.message;
  trouble.hidden = false;
  document.body.dataset.ready = "no";
  throw error;
});
