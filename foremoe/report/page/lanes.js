"use strict";
// Lanes of coloured spans over time, drawn with the same code on a canvas and as SVG. A lane is {label, top, height, levels, each}
// where each(from, to, emit) calls emit(start, end, kind, level) for every span that touches [from, to], in seconds.

const LANES = { left: 74, right: 14, top: 40, bottom: 8 };
const MAX_MARKS = 12000;

/** Picture of lanes in a window of time: rectangles if they are few, else a bitmap of shares per pixel column. */
function lanePicture(lanes, view, wide, kinds, theme) {
  const marks = lanesAsRectangles(lanes, view, wide);
  return marks !== null ? { marks } : { bitmap: lanesAsBitmap(lanes, view, wide, kinds, theme) };
}

function lanesAsRectangles(lanes, [from, to], wide) {
  const marks = [], scale = wide / (to - from);
  for (const lane of lanes) {
    const high = lane.height / lane.levels;
    lane.each(from, to, (start, end, kind, level) => {
      if (marks.length > MAX_MARKS) return;
      const x = Math.max(start, from), width = (Math.min(end, to) - x) * scale;
      if (width > 0) marks.push([(x - from) * scale, lane.top + level * high, width, high, kind]);
    });
    if (marks.length > MAX_MARKS) return null;
  }
  return marks;
}

/** Every pixel column of a lane shows, from the top, the share of its time for each kind. */
function lanesAsBitmap(lanes, [from, to], wide, kinds, theme) {
  const columns = Math.max(1, Math.floor(wide)), height = Math.ceil(Math.max(...lanes.map((lane) => lane.top + lane.height)));
  const canvas = html("canvas", { width: columns, height }), context = canvas.getContext("2d");
  const image = context.createImageData(columns, height), pixels = new Uint32Array(image.data.buffer);
  const colours = kinds.map((kind) => { const [r, g, b] = rgbOf(theme[kind]); return (255 << 24 | b << 16 | g << 8 | r) >>> 0; });
  const shares = new Float32Array(columns * kinds.length), scale = columns / (to - from), K = kinds.length;
  for (const lane of lanes) {
    shares.fill(0);
    if (!lane.shares?.(from, to, columns, shares, K)) lane.each(from, to, (start, end, kind) => {
      const a = Math.max((start - from) * scale, 0), b = Math.min((end - from) * scale, columns);
      const first = Math.floor(a), last = Math.min(Math.floor(b), columns - 1);
      if (first === last) { shares[first * K + kind] += b - a; return; }
      shares[first * K + kind] += first + 1 - a;
      for (let c = first + 1; c < last; c++) shares[c * K + kind] += 1;
      shares[last * K + kind] += b - last;
    });
    const top = Math.round(lane.top), high = Math.max(1, Math.round(lane.height));
    for (let c = 0; c < columns; c++) {
      let total = 0;
      for (let k = 0; k < K; k++) total += shares[c * K + k];
      // Concurrent copies on several links fill a column more than once.
      const norm = total > 1 ? 1 / total : 1;
      let sum = 0, y = 0;
      for (let k = 0; k < K; k++) {
        sum += shares[c * K + k] * norm;
        const until = Math.round(sum * high);
        for (; y < until; y++) pixels[(top + y) * columns + c] = colours[k];
      }
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Time marks over a window: [seconds, text]. */
function timeMarks([from, to], wide) {
  const [scale, unit] = TIME_UNITS[to - from >= 2 ? 0 : to - from >= 2e-3 ? 1 : 2];
  const list = ticks(from / scale, to / scale, Math.max(2, Math.floor(wide / 110)));
  const digits = list.length > 1 ? Math.max(0, -Math.floor(Math.log10(list[1] - list[0]) + 1e-9)) : 0;
  return list.map((value) => [value * scale, `${fixed(value, digits)} ${unit}`]);
}

/** Axis, names and background of the lanes as a list of drawing steps: ["line"|"rect"|"text", ...]. */
function laneFrame(source, lanes, view, width, theme) {
  const steps = [], wide = width - LANES.left - LANES.right, bottom = Math.max(...lanes.map((lane) => lane.top + lane.height));
  const x = (t) => LANES.left + (t - view[0]) / (view[1] - view[0]) * wide;
  for (const [t, text] of timeMarks(view, wide)) {
    steps.push(["line", x(t), 32, x(t), bottom + 3, theme.grid]);
    if (x(t) + measure(text) / 2 < width) steps.push(["text", x(t), 12, text, theme.muted, "middle"]);
  }
  for (const { from, to, name, short, odd } of source.bands(view, wide)) {
    const a = Math.max(x(from), LANES.left), b = Math.min(x(to), width - LANES.right);
    if (b - a < 1) continue;
    steps.push(["rect", a, 18, b - a, 14, odd ? theme.band : theme.grid]);
    const shown = [name, short].find((text) => b - a > measure(text, 10) + 6);
    if (shown) steps.push(["text", (a + b) / 2, 29, shown, theme.ink, "middle", 10]);
  }
  for (const lane of lanes) if (lane.label) steps.push(["text", LANES.left - 8, lane.labelY ?? lane.top + lane.height / 2 + 4, lane.label, lane.strong ? theme.ink : theme.muted, "end", Math.min(11, Math.max(lane.height, 9))]);
  return steps;
}

/** Draws a window on a 2d context that is scaled to CSS pixels. */
function paintLanes(context, source, lanes, view, width, height, theme) {
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, width, height);
  for (const [kind, ...args] of laneFrame(source, lanes, view, width, theme)) {
    if (kind === "text") {
      const [x, y, text, colour, anchor, size = 11] = args;
      context.font = `${size}px ${FONT}`; context.textAlign = anchor === "middle" ? "center" : anchor; context.fillStyle = colour;
      context.fillText(text, x, y);
    } else if (kind === "rect") { context.fillStyle = args[4]; context.fillRect(...args.slice(0, 4)); }
    else { context.strokeStyle = args[4]; context.beginPath(); context.moveTo(args[0], args[1]); context.lineTo(args[2], args[3]); context.stroke(); }
  }
  const { marks, bitmap } = lanePicture(lanes, view, width - LANES.left - LANES.right, source.kinds, theme);
  if (bitmap) { context.imageSmoothingEnabled = false; context.drawImage(bitmap, LANES.left, 0, width - LANES.left - LANES.right, bitmap.height); }
  else for (const [x, y, w, h, kind] of marks) { context.fillStyle = theme[source.kinds[kind]]; context.fillRect(LANES.left + x, y, Math.max(w, 0.4), h - (h > 5 ? 0.5 : 0)); }
}

/** The same window as SVG, for export. */
function lanesAsSvg(source, lanes, view, width, height, theme, names) {
  const kinds = legend(theme, LANES.left, height + 14, names.map(([kind, name]) => ({ colour: theme[kind], name })), { room: width - LANES.left });
  const root = canvasOf(width, height + 10 + 16 * kinds.lines, theme, "Timeline");
  for (const [kind, ...args] of laneFrame(source, lanes, view, width, theme)) {
    if (kind === "text") root.append(label(args[0], args[1], args[2], theme, { anchor: args[4], colour: args[3], size: args[5] || 11 }));
    else if (kind === "rect") root.append(svg("rect", { x: args[0], y: args[1], width: args[2], height: args[3], fill: args[4] }));
    else root.append(svg("line", { x1: args[0], y1: args[1], x2: args[2], y2: args[3], stroke: args[4] }));
  }
  const wide = width - LANES.left - LANES.right, { marks, bitmap } = lanePicture(lanes, view, wide, source.kinds, theme);
  if (bitmap) root.append(svg("image", { x: LANES.left, y: 0, width: wide, height: bitmap.height, preserveAspectRatio: "none", href: bitmap.toDataURL("image/png"), "image-rendering": "pixelated" }));
  else for (const [x, y, w, h, kind] of marks) root.append(svg("rect", { x: (LANES.left + x).toFixed(2), y, width: Math.max(w, 0.4).toFixed(2), height: h, fill: theme[source.kinds[kind]] }));
  root.append(kinds.group);
  return root;
}
