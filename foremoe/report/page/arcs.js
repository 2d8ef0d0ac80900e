"use strict";
// The replicas of one row as arcs from home rank to serving rank, below the ranks' bars and on the same scale.

const WAYS = {
  peer: "by peer link", rdma: "by RDMA", host: "from host memory",
  held: facts.executable ? "still in its buffer" : "re-placed, not sent",
};

function drawArcs(theme, width, { rows, n, rank }) {
  const scale = rankScale(width, facts.G), list = rows.replicas(n), height = 212, base = 22, low = height - 28;
  const root = canvasOf(width, height, theme, `${list.length} replicas as arcs from home rank to serving rank`);
  root.append(nodeBands(theme, scale, base, low, null));
  root.append(svg("line", { x1: ROW.left, x2: width - ROW.right, y1: base, y2: base, stroke: theme.line }));
  for (const g of indexTicks(facts.G, scale.each, 24)) root.append(label(scale.middle(g), base - 8, g, theme, { anchor: "middle", colour: theme.muted }));
  root.append(label(ROW.left - 6, base - 8, "rank", theme, { anchor: "end", colour: theme.muted }));
  const most = Math.max(...list.map((replica) => replica.quota), 1), chain = rank === null ? null : rows.chain(n, rank);
  // Dim arcs first, so that the chosen chain lies on top.
  const order = chain === null ? list : [...list].sort((a, b) => chain.has(a.y) - chain.has(b.y));
  for (const replica of order) root.append(arc(theme, scale, replica, base, low, most, chain !== null && !chain.has(replica.y)));
  if (rank !== null) root.append(svg("circle", { cx: scale.middle(rank), cy: base, r: 4, fill: theme.chosen, stroke: theme.ink }));
  if (!list.length) root.append(label((width - ROW.right + ROW.left) / 2, (base + low) / 2, "no replicas in this row", theme, { anchor: "middle", colour: theme.muted }));
  const used = [...new Set(list.map((replica) => replica.way))];
  const names = legend(theme, width < 560 ? 4 : ROW.left, height - 8, Object.keys(WAYS).filter((way) => used.includes(way)).map((way) => ({ colour: theme[way], name: `weights ${WAYS[way]}` })));
  root.append(names.group);
  const words = `width: pairs moved, up to ${whole(most)}`;
  if (list.length && ROW.left + names.width + measure(words) < width) root.append(label(ROW.left + names.width + 4, height - 8, words, theme, { colour: theme.muted }));
  return root;
}

function arc(theme, scale, replica, base, low, most, dim) {
  const from = scale.middle(replica.home), to = scale.middle(replica.rank), far = Math.abs(to - from) / (scale.each * facts.G);
  const deep = base + 14 + (low - base - 22) * Math.sqrt(far), wide = 0.8 + 4 * Math.sqrt(replica.quota / most);
  const group = svg("g", { opacity: dim ? 0.1 : 0.85, class: "arc" });
  // The control points of a cubic curve lie a third deeper than the curve itself.
  const control = base + (deep - base) * 4 / 3;
  group.append(svg("path", { d: `M${from},${base} C${from},${control} ${to},${control} ${to},${base + 5}`, fill: "none", stroke: theme[replica.way], "stroke-width": wide }));
  const tipHalf = Math.min(2 + wide / 2, Math.max(scale.each / 2, 1.5));
  group.append(svg("path", { d: `M${to},${base} l${-tipHalf},7 l${2 * tipHalf},0 z`, fill: theme[replica.way] }));
  return group;
}
