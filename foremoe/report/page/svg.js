"use strict";
// Small helpers for SVG and HTML nodes, scales, ticks and numbers with units.

const SVG = "http://www.w3.org/2000/svg";
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** A line of text; `anchor` start, middle or end. */
function label(x, y, text, theme, { anchor = "start", size = 11, colour = theme.ink, weight = null, halo = null } = {}) {
  return svg("text", { x, y, "text-anchor": anchor, "font-size": size, fill: colour, "font-weight": weight, stroke: halo, "stroke-width": halo && 4, "stroke-linejoin": halo && "round", "paint-order": halo && "stroke" }, text);
}

/** Root of a figure: font and background are attributes, so that an exported file looks the same anywhere. */
function canvasOf(width, height, theme, description) {
  const root = svg("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}`, "font-family": FONT, "font-size": 11, role: "img", "aria-label": description });
  root.append(svg("rect", { width, height, fill: theme.paper }));
  return root;
}

const measure = (() => {
  const context = document.createElement("canvas").getContext("2d");
  return (text, size = 11) => { context.font = `${size}px ${FONT}`; return context.measureText(text).width; };
})();

/** Text cut with an ellipsis to `width` pixels. */
function fitted(text, width, size = 11) {
  if (measure(text, size) <= width) return text;
  let end = text.length;
  while (end > 1 && measure(text.slice(0, end) + "…", size) > width) end--;
  return text.slice(0, end) + "…";
}

/** Round numbers from low to high, about `count` of them. */
function ticks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((s) => s * power >= raw * 0.999);
  const list = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) list.push(Number((k * step).toPrecision(12)));
  return list;
}

/** Whole numbers 0, s, 2s ... below count, at least `gap` pixels apart; with gaps wider than the labels. */
function indexTicks(count, pixelsEach, gap = 26) {
  const step = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 500, 512, 1000, 2000, 5000].find((s) => s * pixelsEach >= gap) || count;
  const list = [];
  for (let i = 0; i < count; i += step) list.push(i);
  return list;
}

const whole = (value) => Math.round(value).toLocaleString("en-US");
const fixed = (value, digits) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** Three significant digits with a unit that keeps the number between 1 and 1000. */
function scaled(value, units) {
  const [factor, unit] = units.find(([f]) => Math.abs(value) >= f) || units[units.length - 1];
  const number = value / (factor || 1);
  const digits = number === 0 ? 0 : Math.max(0, 2 - Math.floor(Math.log10(Math.abs(number)) + 1e-9));
  return `${fixed(number, Math.min(digits, 2))} ${unit}`;
}
const seconds = (value) => scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
const bytes = (value) => scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
/** "from → to" in seconds, both in the unit of the longer one. */
function change(from, to) {
  const [factor, unit] = unitOf(Math.max(from, to), TIME_UNITS), show = (value) => scaled(value / factor, [[0, ""]]).trim();
  return `${show(from)} → ${show(to)} ${unit}`;
}
const percent = (value, digits = 2) => `${fixed(value * 100, digits)} %`;
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Axis unit for values up to `most`: factor and name. */
const unitOf = (most, units) => units.find(([factor]) => most >= factor) || units[units.length - 1];
const TIME_UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const BYTE_UNITS = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];

/** Horizontal grid lines with numbers left of them, and the axis' name on top of it. */
function yAxis(theme, { left, right, top, bottom, most, name, factor = 1, count = 4 }) {
  const group = svg("g", {});
  const list = ticks(0, most / factor, count);
  const step = list.length > 1 ? list[1] - list[0] : 1, digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  for (const value of list) {
    const y = bottom - (value * factor / most) * (bottom - top);
    group.append(svg("line", { x1: left, x2: right, y1: y, y2: y, stroke: theme.grid }));
    group.append(label(left - 6, y + 4, fixed(value, digits), theme, { anchor: "end", colour: theme.muted }));
  }
  group.append(label(4, top - 9, name, theme, { colour: theme.muted }));
  return group;
}
