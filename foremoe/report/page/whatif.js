"use strict";
// What other numbers of redundant slots would give: a slider over plans that were made, and figures of the chosen one.

function whatIfFigures() {
  const list = facts.what_if, slider = document.getElementById("what-if-slots"), words = document.getElementById("what-if-words");
  const start = Math.max(list.findIndex((row) => row.redundant === facts.R), 0), skew_RN = list.map((_, i) => Float32Array.from(rows.arrays[`what_if_skew_${i}_N`], (skew) => skew / 1000));
  slider.max = String(list.length - 1);
  slider.value = String(start);
  slider.disabled = list.length < 2;
  const at = () => Number(slider.value), worst = skew_RN.reduce((most, skew_N) => skew_N.reduce((a, b) => Math.max(a, b), most), 1);
  figure("what-if", (theme, width) => drawParts(theme, width, whatIfBars(list), at()));
  figure("what-if-skew", (theme, width, paper) => drawHeat(theme, width, { values_N: skew_RN[at()], most: worst, name: `with R = ${list[at()].redundant}`, chosen: paper ? null : state.row }),
    { afterDraw: (plot) => heatControls(plot, rows, skew_RN[at()], `with R = ${list[at()].redundant}`, choose), paperWidth: 700 });
  onChosen.push(() => figures.get("what-if-skew").redraw());
  const show = () => {
    words.textContent = whatIfWords(list[at()], list[start]);
    slider.setAttribute("aria-valuetext", `R = ${list[at()].redundant}`);
    document.querySelector("#what-if-skew figcaption").firstChild.textContent = `Skew with R = ${list[at()].redundant}`;
    for (const id of ["what-if", "what-if-skew"]) figures.get(id).redraw();
  };
  slider.addEventListener("input", show);
  show();
  document.getElementById("what-if-table").append(whatIfTable(list));
}

function whatIfBars(list) {
  return list.map((row) => ({ name: `R = ${row.redundant}`, how: "simulated", parts: row.parts }));
}

function whatIfWords(row, now) {
  const against = row === now ? "" : `, ${fixed(now.simulated_stage_s / row.simulated_stage_s, 3)} x the speed of R = ${now.redundant}`;
  return `R = ${row.redundant}: skew ${fixed(row.skew_mean, 3)} mean, ${fixed(row.skew_p99, 3)} p99; stage ${seconds(row.simulated_stage_s)}${against}; ` +
    `${fixed(row.replicas_per_rank, 2)} replicas per rank; ${bytes(row.peak_bytes)} of memory, ${row.fits ? "fits" : "does not fit"}`;
}
