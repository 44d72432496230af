// Points at places of the timeline's page, as a mouse would, and returns what the page shows of each.
// POINTS: [index of the view, rank, moment as a part of the span].
"use strict";
function probe(points) {
  const LABELS = 64, BUBBLES = 62, PITCH = 28;
  const tip = document.getElementById("tip"), shownAt = (view, rank, x) => {
    const over = document.getElementById("views").querySelectorAll("canvas")[2 * view + 1];
    const { left, top } = over.getBoundingClientRect();
    over.dispatchEvent(new PointerEvent("pointermove", { clientX: left + x, clientY: top + rank * PITCH + 12, bubbles: true }));
    if (tip.hidden) return null;
    return { title: tip.querySelector("b").textContent, rows: [...tip.querySelector("table").rows].map((row) => [...row.cells].map((cell) => cell.textContent)) };
  };
  const width = document.getElementById("axis").clientWidth - LABELS - BUBBLES;
  const shown = points.map(([view, rank, part]) => shownAt(view, rank, LABELS + part * width));
  const outside = shownAt(0, 0, 10);
  // zooming leaves the moment under the pointer where it is
  const [view, rank, part] = points[0], over = document.getElementById("views").querySelectorAll("canvas")[2 * view + 1];
  const { left, top } = over.getBoundingClientRect(), x = LABELS + part * width;
  for (let i = 0; i < 16; i++) over.dispatchEvent(new WheelEvent("wheel", { clientX: left + x, clientY: top + rank * PITCH + 12, deltaY: -100, cancelable: true }));
  const zoomed = shownAt(view, rank, x), beside = shownAt(view, rank, x + width / 4);
  return { shown, outside, zoomed, beside, asked: performance.getEntriesByType("resource").map((one) => one.name) };
}
