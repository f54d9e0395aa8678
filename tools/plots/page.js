"use strict";
// Values of the curves under the pointer, and sorted rows. Everything else on the page works without this.
for (const panel of document.querySelectorAll(".panel")) {
  const svg = panel.querySelector(":scope > svg");
  const curves = [...svg.querySelectorAll(".curve")].map(readCurve);
  svg.addEventListener("pointermove", (event) => show(panel, svg, curves, event));
  svg.addEventListener("pointerdown", (event) => show(panel, svg, curves, event));
  svg.addEventListener("pointerleave", () => clear(panel));
}

for (const sheet of document.querySelectorAll(".sheet")) {
  const tables = [...sheet.querySelectorAll("table")].map((table) => ({ table, rows: [...table.tBodies[0].rows] }));
  for (const { table, rows } of tables) {
    for (const [column, head] of [...table.querySelectorAll(".sub")].entries()) {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      head.append(button);
      button.title = "sort";
      button.addEventListener("click", () => sort(sheet, tables, head, rows.map((row) => row.cells[column].innerText.trim())));
    }
  }
}

function sort(sheet, tables, head, texts) {
  const goesDown = head.ariaSort ? head.ariaSort === "ascending" : "down" in head.dataset;
  sheet.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
  head.ariaSort = goesDown ? "descending" : "ascending";
  const isEmpty = (text) => text === "-";
  const areNumbers = texts.every((text) => isEmpty(text) || !isNaN(parseFloat(text)));
  const compare = (a, b) => (areNumbers ? parseFloat(a) - parseFloat(b) : a.localeCompare(b));
  const order = texts.map((_, row) => row).sort((i, j) => isEmpty(texts[i]) - isEmpty(texts[j])
    || (isEmpty(texts[i]) ? 0 : (goesDown ? -1 : 1) * compare(texts[i], texts[j])));
  for (const { table, rows } of tables) table.tBodies[0].append(...order.map((row) => rows[row]));
}

function readCurve(element) {
  const numbers = (text) => (text.match(/[-+.\de]+/g) || []).map(Number);
  const places = numbers(element.querySelector(".line").getAttribute("d"));
  const values = element.dataset.values.split(" ");
  const points = numbers(element.dataset.iters).map((iter, i) => ({
    iter, value: values[i], x: places[2 * i], y: places[2 * i + 1],
  }));
  return { element, points };
}

function clear(panel) {
  panel.querySelectorAll(".tip, .cursor, .dot").forEach((element) => element.remove());
}

function show(panel, svg, curves, event) {
  clear(panel);
  const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
  const nearest = (points) => points.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a));
  const visible = curves.filter(({ element, points }) => points.length && getComputedStyle(element).display !== "none");
  if (!visible.length) return;
  const found = visible.map(({ element, points }) => ({ element, ...nearest(points) }));
  const { iter, x: at } = nearest(found);

  const box = svg.viewBox.baseVal;
  draw(svg, "path", { class: "cursor", d: `M${at} 8V${box.height - 34}` });
  const tip = panel.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.append(`after ${iter} iterations`);
  for (const point of found.filter((point) => Math.abs(point.x - at) < box.width / 6)) {
    const run = [...point.element.classList].find((name) => name.startsWith("run"));
    draw(svg, "circle", { class: `dot curve ${run}`, cx: point.x, cy: Math.min(Math.max(point.y, 8), box.height - 34), r: 4 });
    const row = tip.appendChild(document.createElement("div"));
    const label = row.appendChild(document.createElement("span"));
    label.className = run;
    label.textContent = point.element.dataset.label;
    row.appendChild(document.createElement("b")).textContent =
      point.value + (point.iter === iter ? "" : ` after ${point.iter}`);
  }
  const pixels = (at / box.width) * svg.clientWidth + svg.offsetLeft;
  const room = panel.clientWidth - tip.offsetWidth - 8;
  const left = pixels + 12 > room ? pixels - tip.offsetWidth - 12 : pixels + 12;
  tip.style.left = `${Math.max(8, Math.min(left, room))}px`;
  tip.style.top = "100%"; // below the curves, so that it does not hide them
}

function draw(svg, name, attributes) {
  const element = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
}
