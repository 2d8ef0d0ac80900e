"use strict";

/** An HTML table; a column is {heading, unit, left}, a cell is text. */
function table(columns, rows, caption = null) {
  const head = html("tr", {}, ...columns.map((c) => html("th", { scope: "col", class: c.left ? "left" : null }, c.heading, c.unit ? html("small", {}, c.unit) : null)));
  const body = rows.map((cells) => html("tr", {}, ...cells.map((cell, i) => html("td", { class: columns[i].left ? "left" : null }, cell))));
  const node = html("table", {}, caption === null ? null : html("caption", {}, caption), html("thead", {}, head), html("tbody", {}, ...body));
  return node;
}

function strategyTable({ columns, rows }) {
  const heads = [{ heading: "strategy", left: true }, ...columns];
  const cells = rows.map((row) => [row.name, ...row.cells.map((value, i) => (value === null ? "-" : fixed(value, columns[i].digits)))]);
  const notes = rows.filter((row) => row.note).map((row) => html("p", { class: "note" }, `${row.name}: ${row.note}`));
  return [table(heads, cells), ...notes];
}

function whatIfTable(list) {
  const simulated = list.some((row) => row.simulated_stage_s != null);
  const columns = [{ heading: "R" }, { heading: "skew mean" }, { heading: "skew p99" }, { heading: "replicas", unit: "per rank" }, { heading: "predicted stage", unit: "s" },
    ...(simulated ? [{ heading: "simulated stage", unit: "s" }] : []), { heading: "peak memory", unit: "GB" }];
  return table(columns, list.map((row) => [String(row.redundant), fixed(row.skew_mean, 3), fixed(row.skew_p99, 3), fixed(row.replicas_per_rank, 2), fixed(row.predicted_stage_s, 3),
    ...(simulated ? [row.simulated_stage_s == null ? "-" : fixed(row.simulated_stage_s, 3)] : []), fixed(row.peak_bytes / 1e9, 2)]));
}

function planningTable(planning) {
  const unit = facts.objective === "time" ? "s" : "pairs";
  const columns = [{ heading: "level", left: true }, { heading: "wall", unit: "ms" }, { heading: "skew mean", unit: "after it" }, { heading: "objective", unit }, { heading: "rows improved" }];
  return table(columns, planning.levels.map((level) => [level.solver, fixed(level.seconds * 1e3, 1), fixed(level.skew_mean, 3), fixed(level.objective_sum, unit === "s" ? 3 : 0), whole(level.rows_improved)]));
}
