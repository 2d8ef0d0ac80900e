"use strict";
// The timeline figure: an overview strip, and a window of it that zooms and pans.

class TimelineView {
  constructor(source) {
    Object.assign(this, { source, view: [0, source.total], follow: true, links: source.ranks.length <= 16 });
    this.least = Math.max(source.total * 1e-7, 1e-7);
    const nodes = [...new Set(source.ranks.map((g) => facts.node_of_rank_G[g]))];
    this.groups = [["all ranks", source.ranks], ...nodes.map((v) => [`node ${v}`, source.ranks.filter((g) => facts.node_of_rank_G[g] === v)])];
    if (nodes.length === 1) this.groups.length = 1;
    this.group = source.ranks.length > 16 && this.groups.length > 1 ? 1 : 0;
    this.links = this.groups[this.group][1].length <= 16;
    this.relane();
    this.controls();
    figures.set("timeline", { paper: () => this.paper(), redraw: () => this.redraw() });
    this.mount();
  }

  relane() {
    this.lanes = this.source.lanes(this.groups[this.group][1], this.links);
    this.height = Math.max(...this.lanes.map((lane) => lane.top + lane.height)) + LANES.bottom;
  }

  controls() {
    const place = document.getElementById("time-controls");
    const ranks = html("select", { id: "time-ranks" }, ...this.groups.map(([name], i) => html("option", { value: i }, name)));
    ranks.value = String(this.group);
    ranks.addEventListener("change", () => { this.group = Number(ranks.value); this.relane(); this.redraw(); });
    place.append(html("label", {}, "ranks ", ranks));
    if (this.source.copies && facts.timeline.kind === "simulated") place.append(this.tick("copies", this.links, (on) => { this.links = on; this.relane(); this.redraw(); }));
    place.append(this.tick("follow the chosen row", this.follow, (on) => { this.follow = on; if (on) this.show(this.source.around(state.row)); }));
    const button = (text, title, act) => { const b = html("button", { type: "button", "aria-label": title, title }, text); b.addEventListener("click", act); place.append(b); };
    button("−", "zoom out", () => this.zoom(2));
    button("+", "zoom in", () => this.zoom(0.5));
    button("whole stage", "show the whole stage", () => this.show([0, this.source.total]));
    this.words = html("span", { class: "muted", "aria-live": "polite" });
    place.append(this.words);
  }

  tick(text, on, act) {
    const box = html("input", { type: "checkbox" });
    box.checked = on;
    box.addEventListener("change", () => act(box.checked));
    return html("label", {}, box, ` ${text}`);
  }

  mount() {
    const node = document.getElementById("timeline"), tools = html("span", { class: "tools" });
    for (const kind of ["svg", "png"]) {
      const button = html("button", { type: "button", "aria-label": `Save this figure as ${kind.toUpperCase()}` }, kind.toUpperCase());
      button.addEventListener("click", async () => save(`${fileStem()}-timeline.${kind}`, await exported("timeline", kind)));
      tools.append(button);
    }
    node.querySelector("figcaption").append(tools);
    this.legend = html("div", { class: "plot" });
    this.strip = html("canvas", { class: "strip", "aria-hidden": "true" });
    this.canvas = html("canvas", { id: "lanes", tabindex: "0", role: "img", "aria-label": "Timeline lanes; arrow keys pan, plus and minus zoom, Home shows the whole stage" });
    this.scroll = html("div", { class: "lanes scroll" }, this.canvas);
    node.append(this.legend, this.strip, this.scroll);
    this.pointer();
    this.canvas.addEventListener("keydown", (event) => {
      const span = this.view[1] - this.view[0];
      const act = { ArrowLeft: () => this.pan(-span / 8), ArrowRight: () => this.pan(span / 8), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), Home: () => this.show([0, this.source.total]) }[event.key];
      if (act) { event.preventDefault(); act(); }
    });
    this.stripKey = "";
    this.show(this.source.around(state.row));
  }

  pointer() {
    let grip = null;
    const timeAt = (event, node) => {
      const box = node.getBoundingClientRect(), share = (event.clientX - box.left - LANES.left) / (box.width - LANES.left - LANES.right);
      return node === this.strip ? share * this.source.total : this.view[0] + share * (this.view[1] - this.view[0]);
    };
    for (const node of [this.canvas, this.strip]) {
      node.addEventListener("pointerdown", (event) => { grip = { at: timeAt(event, node), node }; node.setPointerCapture(event.pointerId); if (node === this.strip) this.center(grip.at); });
      node.addEventListener("pointerup", () => { grip = null; });
      node.addEventListener("pointerleave", hideTip);
    }
    this.strip.addEventListener("pointermove", (event) => { if (grip) this.center(timeAt(event, this.strip)); });
    this.canvas.addEventListener("pointermove", (event) => {
      if (grip) { this.pan(grip.at - timeAt(event, this.canvas)); return; }
      const y = event.clientY - this.canvas.getBoundingClientRect().top, lane = this.lanes.find((l) => y >= l.top && y < l.top + l.height + 1);
      const t = timeAt(event, this.canvas);
      showTip(event, lane && t >= this.view[0] && t <= this.view[1] ? this.source.describe(lane, t) : "");
    });
    this.canvas.addEventListener("wheel", (event) => {
      // The wheel alone scrolls the page. Zooming requires a key, as for maps in web pages.
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      if (event.shiftKey) this.pan((this.view[1] - this.view[0]) * Math.sign(event.deltaY || event.deltaX) / 8);
      else this.zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event, this.canvas));
    }, { passive: false });
    this.canvas.addEventListener("dblclick", (event) => this.zoom(0.4, timeAt(event, this.canvas)));
  }

  center(t) { const half = (this.view[1] - this.view[0]) / 2; this.show([t - half, t + half]); }
  pan(by) { this.show([this.view[0] + by, this.view[1] + by]); }
  zoom(factor, at = (this.view[0] + this.view[1]) / 2) { this.show([at + (this.view[0] - at) * factor, at + (this.view[1] - at) * factor]); }

  show([from, to]) {
    const span = Math.min(Math.max(to - from, this.least), this.source.total), low = Math.min(Math.max(from, 0), this.source.total - span);
    this.view = [low, low + span];
    if (!this.waiting) { this.waiting = true; requestAnimationFrame(() => { this.waiting = false; this.redraw(); }); }
  }

  redraw() {
    const theme = themeNow(), width = printing ? PRINT_WIDTH : Math.floor(this.scroll.clientWidth);
    if (width < 100) return;
    const began = performance.now();
    this.legend.replaceChildren(this.legendOf(theme, width));
    this.paint(this.canvas, width, this.height, theme, (context) => paintLanes(context, this.source, this.lanes, this.view, width, this.height, theme));
    this.paint(this.strip, width, 34, theme, (context) => this.paintStrip(context, width, theme));
    this.words.textContent = `${seconds(this.view[1] - this.view[0])} from ${seconds(this.view[0])}, of ${seconds(this.source.total)}`;
    this.drawn_ms = performance.now() - began;
  }

  legendOf(theme, width) {
    const names = legend(theme, LANES.left, 13, this.source.names.map(([kind, name]) => ({ colour: theme[kind], name })), { room: width - LANES.left });
    return svg("svg", { width, height: 2 + 16 * names.lines, role: "img", "aria-label": "Legend", "font-family": FONT }, names.group);
  }

  paint(canvas, width, height, theme, draw) {
    const density = Math.min(window.devicePixelRatio || 1, 16000 / height);
    if (canvas.width !== Math.round(width * density) || canvas.height !== Math.round(height * density)) {
      canvas.width = Math.round(width * density);
      canvas.height = Math.round(height * density);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(density, 0, 0, density, 0, 0);
    draw(context);
  }

  /** The whole stage in one lane (of one rank), cached until width or colours change, and the window in it. */
  paintStrip(context, width, theme) {
    const wide = width - LANES.left - LANES.right, key = `${wide} ${theme.paper}`;
    if (this.stripKey !== key) {
      const lanes = this.source.lanes(this.source.ranks.slice(0, 1), false);
      this.stripMap = lanesAsBitmap([{ top: 0, height: 20, each: (from, to, emit) => lanes.forEach((lane) => lane.each(from, to, emit)) }], [0, this.source.total], wide, this.source.kinds, theme);
      this.stripKey = key;
    }
    context.fillStyle = theme.paper;
    context.fillRect(0, 0, width, 34);
    context.drawImage(this.stripMap, LANES.left, 7, wide, 20);
    const x = (t) => LANES.left + t / this.source.total * wide, from = x(this.view[0]), to = Math.max(x(this.view[1]), from + 3);
    context.strokeStyle = theme.ink;
    context.lineWidth = 2;
    context.strokeRect(from - 1, 4, to - from + 2, 26);
    context.fillStyle = theme.muted;
    context.font = `11px ${FONT}`;
    context.textAlign = "end";
    context.fillText("whole stage", LANES.left - 8, 21);
  }

  paper() { return lanesAsSvg(this.source, this.lanes, this.view, 1100, this.height, LIGHT, this.source.names); }
}
