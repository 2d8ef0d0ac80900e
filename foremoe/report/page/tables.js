"use strict";
// Tables that sort by any column and can be saved as CSV.

const sortedBy = new Map();

/**
 * An HTML table; a column is {heading, unit, left}, a cell is text or [text, value] with the number or text behind it.
 * `name` names the CSV file, and keeps the order where the table is made anew.
 */
function table(name, columns, rows, caption = null) {
  const lines = rows.map((cells) => cells.map((cell) => (Array.isArray(cell) ? cell : [cell, cell])));
  const body = html("tbody"), heads = columns.map((c, i) => {
    const button = html("button", { type: "button", class: "sort", title: "sort by this column" }, c.heading, c.unit ? html("small", {}, c.unit) : null);
    button.addEventListener("click", () => { const last = sortedBy.get(name); sortedBy.set(name, { i, down: last?.i === i ? !last.down : !c.left }); fillBody(); });
    return html("th", { scope: "col", class: c.left ? "left" : null }, button);
  });
  function fillBody() {
    const { i = null, down = false } = sortedBy.get(name) || {};
    heads.forEach((head, k) => { if (k === i) head.setAttribute("aria-sort", down ? "descending" : "ascending"); else head.removeAttribute("aria-sort"); });
    const order = i === null ? lines : [...lines].sort((a, b) => (down ? -1 : 1) * compared(a[i][1], b[i][1]));
    body.replaceChildren(...order.map((cells) => html("tr", {}, ...cells.map(([text], k) => html("td", { class: columns[k].left ? "left" : null }, text)))));
  }
  fillBody();
  const button = html("button", { type: "button", "aria-label": `Save this table as CSV` }, "CSV");
  button.addEventListener("click", () => save(`${fileStem()}-${name}.csv`, new Blob([csv(columns, lines)], { type: "text/csv" })));
  return html("table", { "data-name": name }, html("caption", {}, html("span", {}, caption || ""), html("span", { class: "tools" }, button)), html("thead", {}, html("tr", {}, ...heads)), body);
}

/** Compares numbers by size and all else as text, with blanks first. */
function compared(a, b) {
  if (a === null || b === null) return (a !== null) - (b !== null);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

function csv(columns, lines) {
  // Text that a spreadsheet would run as a formula gets a leading quote.
  const quoted = (value) => (typeof value === "number" ? String(value) : `"${String(value ?? "").replace(/^[=+\-@\t]/, "'$&").replaceAll('"', '""')}"`);
  const heads = columns.map((c) => quoted(c.unit ? `${c.heading} (${c.unit})` : c.heading));
  return [heads, ...lines.map((cells) => cells.map(([, value]) => quoted(value)))].map((cells) => cells.join(",")).join("\r\n") + "\r\n";
}

const cell = (value, digits, factor = 1) => (value === null || value === undefined ? ["-", null] : [fixed(value / factor, digits), value / factor]);

/** The row's replicas, or only those in the chain of the chosen rank. */
function replicaTable(rows, n, rank) {
  const chain = rank === null ? null : rows.chain(n, rank);
  const list = rows.replicas(n).filter((replica) => chain === null || chain.has(replica.y)).sort((a, b) => b.quota - a.quota || a.y - b.y);
  const columns = [
    { heading: "expert" }, { heading: "home", unit: "rank" }, { heading: "replica", unit: "rank" }, { heading: "quota", unit: "pairs" },
    { heading: "share", unit: "% of load" }, { heading: "weights", left: true },
  ];
  const cells = list.map((r) => [cell(r.expert, 0), cell(r.home, 0), cell(r.rank, 0), cell(r.quota, 0), cell(100 * r.quota / Math.max(r.load, 1), 1),
    { peer: "peer", rdma: "RDMA", host: "host", held: facts.executable ? "held" : "-" }[r.way]]);
  const what = rank === null ? `${plural(list.length, "replica")} in this row` : `${plural(list.length, "replica")} in the chain through rank ${rank}`;
  return table("replicas", columns, cells, what);
}

function strategyTable({ columns, rows }) {
  const heads = [{ heading: "strategy", left: true }, ...columns];
  const cells = rows.map((row) => [row.name, ...row.cells.map((value, i) => cell(value, columns[i].digits))]);
  // A note of several strategies is shown once.
  const names = new Map();
  for (const row of rows) if (row.note) names.set(row.note, [...(names.get(row.note) || []), row.name]);
  const notes = [...names].map(([note, of]) => html("p", { class: "note" }, `${of.join(", ")}: ${note}`));
  return [table("strategies", heads, cells), ...notes];
}

/** Seconds of each part, for every way of running the stage. */
function partsTable(bars) {
  const most = Math.max(...bars.map(({ parts }) => total(parts))), [factor, unit] = unitOf(most, TIME_UNITS), used = usedParts(bars);
  const columns = [{ heading: "part", left: true }, ...bars.map(({ name, how }) => ({ heading: name, unit: `${how}, ${unit}` }))];
  const line = (title, pick) => [title, ...bars.map(({ parts }) => cell(pick(parts), 3, factor))];
  return table("parts", columns, [...used.map(([part, [title]]) => line(title, (parts) => parts[part] ?? null)), line("stage", total)]);
}

function changesTable(changes) {
  const columns = [{ heading: "change", left: true }, { heading: "throughput", unit: "over now" }, { heading: "fits" }, { heading: "costs or needs", left: true }];
  return table("changes", columns, changes.map((row) => [row.change, cell(row.speedup, 3), row.fits ? "yes" : "no", row.cost]));
}

function planningTable(planning) {
  const unit = facts.objective === "time" ? "s" : "pairs";
  const columns = [{ heading: "level", left: true }, { heading: "wall", unit: "ms" }, { heading: "skew mean", unit: "after it" }, { heading: "objective", unit }, { heading: "rows improved" }];
  return table("planning", columns, planning.levels.map((level) => [level.solver, cell(level.seconds, 1, 1e-3), cell(level.skew_mean, 3), cell(level.objective_sum, unit === "s" ? 3 : 0), cell(level.rows_improved, 0)]));
}
