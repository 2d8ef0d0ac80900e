"use strict";
// Every figure can be saved as SVG and PNG, always on white paper, at a width that suits print.

const PAPER_WIDTH = 1000, PNG_SCALE = 3;
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
      const width = Math.floor(plot.getBoundingClientRect().width);
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

const fileStem = () => `foremoe-${facts.model}-${facts.stage}`.replace(/[^\w.-]+/g, "-").slice(0, 80);

/** A figure's file as a Blob. */
async function exported(id, kind) {
  const node = figures.get(id).paper();
  node.prepend(svg("title", {}, `${facts.model}, ${facts.stage}: ${id} (foremoe ${facts.version})`));
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

// The tip that follows the pointer; what it says also stands in tables and in the line above the figures.
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
