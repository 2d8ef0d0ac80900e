"use strict";
// Every figure can be saved as SVG and PNG, always on white paper, at a width that suits print.

const PAPER_WIDTH = 1000, PNG_SCALE = 3, TITLE_HEIGHT = 46;
const PRINT_WIDTH = 700;
const ROW_FIGURES = ["bars", "arcs"];
let printing = false;
const figures = new Map();

/**
 * Makes a figure of the page: draws it, redraws it when the window or the colour scheme changes, and gives it its buttons.
 * `draw(theme, width, paper)` returns an SVG node (paper: true while exporting, when nothing interactive is needed).
 */
function figure(id, draw, { afterDraw = () => {}, paperWidth = PAPER_WIDTH } = {}) {
  const node = document.getElementById(id), plot = html("div", { class: "plot" });
  const tools = html("span", { class: "tools" });
  for (const kind of ["svg", "png"]) {
    const button = html("button", { type: "button", "aria-label": `Save this figure as ${kind.toUpperCase()}` }, kind.toUpperCase());
    button.addEventListener("click", async () => save(`${fileStem()}-${id}.${kind}`, await exported(id, kind)));
    tools.append(button);
  }
  node.querySelector("figcaption").append(tools);
  node.append(plot);
  const entry = {
    paper: () => draw(LIGHT, paperWidth, true),
    redraw: () => {
      const width = printing ? PRINT_WIDTH : Math.floor(plot.getBoundingClientRect().width);
      if (width < 50) return;
      const focused = plot.contains(document.activeElement);
      plot.replaceChildren(draw(themeNow(), width, false));
      afterDraw(plot);
      if (focused) plot.querySelector("[tabindex]")?.focus({ preventScroll: true });
    },
  };
  figures.set(id, entry);
  entry.redraw();
  return entry;
}

/** A figure under its own title and the case it shows, as needed in a paper or a talk. */
function titled(id, figure_) {
  const width = Number(figure_.getAttribute("width")), height = Number(figure_.getAttribute("height"));
  const title = figureTitle(id), about = [caseWords(), facts.date, `foremoe ${facts.version}`].filter(Boolean).join(" · ");
  const root = canvasOf(width, height + TITLE_HEIGHT, LIGHT, title);
  root.append(svg("title", {}, `${title}: ${about}`), label(8, 18, fitted(title, width - 16, 14), LIGHT, { size: 14, weight: "600" }), label(8, 34, fitted(about, width - 16), LIGHT, { colour: LIGHT.muted }));
  figure_.setAttribute("y", TITLE_HEIGHT);
  root.append(figure_);
  return root;
}

/** The caption of a figure, and the row that it shows, if any. */
function figureTitle(id) {
  const text = document.querySelector(`#${id} figcaption`).firstChild.textContent;
  return ROW_FIGURES.includes(id) ? `${text}: ${rowName(state.row)}` : text;
}

const caseWords = () => `${facts.model}, ${facts.stage}, ${job ? `${partWords()}, ` : ""}${plural(facts.G, "rank")} on ${plural(facts.num_nodes, "node")} of ${facts.cluster}, R = ${facts.R}`;

const fileStem = () => `foremoe-${facts.model}-${facts.stage}${job ? `-part${shownPart}` : ""}`.replace(/[^\w.-]+/g, "-").slice(0, 80);

/** A figure's file as a Blob. */
async function exported(id, kind) {
  const node = titled(id, figures.get(id).paper());
  const text = new XMLSerializer().serializeToString(node);
  if (kind === "svg") return new Blob([text], { type: "image/svg+xml" });
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = html("canvas", { width: node.getAttribute("width") * PNG_SCALE, height: node.getAttribute("height") * PNG_SCALE });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function save(name, blob) {
  const link = html("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function redrawAll() {
  for (const entry of figures.values()) entry.redraw();
}

// For export, everything is drawn again in light colours and at the width of a sheet.
for (const [event, on] of [["beforeprint", true], ["afterprint", false]]) {
  window.addEventListener(event, () => { printing = on; redrawAll(); });
}

// The tip that follows the pointer; its text is also in tables and in the line above the figures.
const tip = document.getElementById("tip");
function showTip(event, text) {
  if (!text) { tip.hidden = true; return; }
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > window.innerWidth ? event.clientX - box.width - 10 : event.clientX + 14;
  const y = event.clientY + 16 + box.height > window.innerHeight ? event.clientY - box.height - 8 : event.clientY + 16;
  tip.style.left = `${Math.max(x, 0)}px`;
  tip.style.top = `${Math.max(y, 0)}px`;
}
const hideTip = () => { tip.hidden = true; };
