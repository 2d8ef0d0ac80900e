"use strict";
// The parts of a job, which are pipeline ranks of EP groups: a table, a figure, and the choice among them.

const partName = ({ group, pipeline_rank }) => `EP group ${group}, pipeline rank ${pipeline_rank}`;

/** Words that distinguish the shown part from the others, or none if there is only one plan. */
const partWords = () => (job === null ? "" : partName(job.parts[shownPart]));

function jobBars() {
  return job.parts.map((part, i) => ({ name: `group ${part.group}, rank ${part.pipeline_rank}`, how: i === job.slowest ? "slowest" : i === shownPart ? "shown" : "", parts: part.planned }));
}

function jobTable() {
  const stages = job.parts.map(({ planned }) => total(planned)), [factor, unit] = unitOf(Math.max(...stages), TIME_UNITS);
  const columns = [
    { heading: "EP group" }, { heading: "pipeline", unit: "rank" }, { heading: "model layers", left: true }, { heading: "skew", unit: "at home" }, { heading: "skew", unit: "planned" },
    { heading: "busy at home", unit }, { heading: "busy planned", unit }, { heading: "bubble", unit: `planned, ${unit}` },
  ];
  const cells = job.parts.map(({ group, pipeline_rank, layers, skew_static, skew_planned, static_busy_s, planned }, i) => [cell(group, 0), cell(pipeline_rank, 0), layers, cell(skew_static, 3),
    cell(skew_planned, 3), cell(static_busy_s, 2, factor), cell(stages[i] - planned.bubble_s, 2, factor), cell(planned.bubble_s, 2, factor)]);
  return table("parts-of-the-job", columns, cells, `slowest: ${partName(job.parts[job.slowest])}`);
}

/** Shows another part by loading the page again, with the part in its address. */
function jobFigures() {
  const choice = document.getElementById("choose-part");
  choice.append(...job.parts.map((part, i) => html("option", { value: i }, partName(part) + (i === job.slowest ? " (slowest)" : ""))));
  choice.value = String(shownPart);
  choice.addEventListener("change", () => { location.hash = `#part=${choice.value}`; });
  const bars = jobBars();
  figure("job-parts", (theme, width) => drawParts(theme, width, bars), { paperWidth: 700 });
  document.getElementById("job-table").append(jobTable());
}
