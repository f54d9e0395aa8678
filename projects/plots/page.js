"use strict";
// Everything that plotly does not do: the boxes of the runs, log axes, the colours of a dark page, sorted rows.
const figures = JSON.parse(document.getElementById("figures").textContent);
const charts = [...document.querySelectorAll(".chart")];
const isTouch = matchMedia("(pointer: coarse)").matches;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(own) {
  const lines = { gridcolor: color("--line"), linecolor: color("--base"), zeroline: false };
  return { tickfont: { color: color("--pale") }, automargin: true, ...lines, ...own };
}

function layout({ layout, limits }) {
  const spike = limits ? { spikecolor: color("--base"), spikethickness: 1 } : {}; // the line at the pointer
  const yaxis = limits ? { tickformat: "~g", hoverformat: ".6~g", range: limits[layout.yaxis.type], nticks: 7 } : {};
  if (layout.yaxis.type === "log") { // plotly labels 1, 2 and 5 for so many
    const numDecades = limits.log[1] - limits.log[0];
    yaxis.nticks = Math.min(5, Math.max(3, Math.ceil(2 * numDecades)));
  }
  return {
    ...layout,
    xaxis: axis({ tickformat: "~s", nticks: 6, title: { text: "iterations", standoff: 4, font: { size: 12 } }, ...spike, ...layout.xaxis }),
    yaxis: axis({ ...yaxis, ...layout.yaxis }),
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true }, // for marks at the lower edge
    font: { family: "inherit", size: 12, color: color("--pale") },
    hoverlabel: { bgcolor: color("--card"), bordercolor: color("--base"), font: { color: color("--ink") }, namelength: -1 },
    modebar: { bgcolor: "transparent", color: color("--base"), activecolor: color("--ink") },
    margin: { l: 44, r: 12, t: 28, b: 40 }, // the buttons are at the top
    paper_bgcolor: color("--card"),
    plot_bgcolor: color("--card"),
    showlegend: false,
    dragmode: isTouch ? false : "zoom", // a finger scrolls the page
  };
}

function draw(chart, figure) {
  for (const trace of figure.data)
    if (trace.type === "heatmap") trace.colorscale = [[0, color("--card")], [1, "#2468b8"]];
  const buttons = [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]]; // none that sends data
  return Plotly.react(chart, figure.data, layout(figure), { responsive: true, displaylogo: false, modeBarButtons: buttons });
}

function drawAll() {
  charts.forEach((chart, i) => draw(chart, figures[i]));
}

function showRun(run, isShown) {
  figures.forEach((figure, i) => {
    if (!figure.limits) return;
    for (const trace of figure.data) if (trace.meta === run) trace.visible = isShown;
    draw(charts[i], figure);
  });
  for (const element of document.querySelectorAll(`[data-of-run="${run}"]`)) element.hidden = !isShown;
}

function sort(table, head) {
  const rows = [...table.tBodies[0].rows];
  const text = (row) => row.cells[head.cellIndex].innerText.trim();
  const isEmpty = (row) => text(row) === "-";
  const areNumbers = rows.every((row) => isEmpty(row) || !isNaN(parseFloat(text(row))));
  const compare = (a, b) => (areNumbers ? parseFloat(text(a)) - parseFloat(text(b)) : text(a).localeCompare(text(b)));
  const isUp = head.ariaSort === "descending" || (!head.ariaSort && !areNumbers);
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  head.ariaSort = isUp ? "ascending" : "descending";
  rows.sort((a, b) => isEmpty(a) - isEmpty(b) || (isEmpty(a) ? 0 : (isUp ? 1 : -1) * compare(a, b)));
  table.tBodies[0].append(...rows);
}

for (const box of document.querySelectorAll("[data-run]"))
  box.addEventListener("change", () => showRun(Number(box.dataset.run), box.checked));
document.querySelectorAll(".log input").forEach((box, i) => {
  box.addEventListener("change", () => {
    figures[i].layout.yaxis.type = box.checked ? "log" : "linear";
    draw(charts[i], figures[i]);
  });
});
for (const head of document.querySelectorAll(".sheet th:has(button)"))
  head.querySelector("button").addEventListener("click", () => sort(head.closest("table"), head));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
