// Numbers, the histogram of accepted lengths, and what the budget chose for each cycle.

import { element as svg } from "./tree.js";

const LEAST_CYCLES = 48; // a bar is no wider than with so many

export const rounded = (value, digits) => (value === null ? "–" : value.toFixed(digits));
export const tokens = (count) => `${count} token${count === 1 ? "" : "s"}`;
export const speed = (value) => (value === null ? "–" : value >= 100 ? value.toFixed(0) : value.toFixed(1));

/** Seconds with three digits, in ms below one second. */
export const duration = (seconds) => (seconds < 1 ? `${(1000 * seconds).toPrecision(seconds < 0.1 ? 2 : 3)} ms` : `${seconds.toPrecision(3)} s`);

/** Draw bars of how many cycles accepted 0, 1, ... tokens; deepest is the most there can be. */
export function drawHistogram(element, counts, deepest) {
  const width = Math.max(deepest + 1, counts.length, 1);
  while (element.childElementCount > width) element.lastChild.remove();
  while (element.childElementCount < width) {
    const column = document.createElement("div");
    column.append(document.createElement("b"), document.createElement("i"), document.createElement("span"));
    element.append(column);
  }
  const most = Math.max(1, ...Array.from(counts, (count) => count ?? 0));
  [...element.children].forEach((column, length) => {
    const count = counts[length] ?? 0;
    const [label, bar, name] = column.children;
    label.textContent = count || "";
    bar.style.height = `${(100 * count) / most}%`;
    name.textContent = length;
  });
  const words = Array.from({ length: width }, (_, length) => `${length}: ${counts[length] ?? 0}`);
  element.setAttribute("aria-label", `Cycles by accepted tokens: ${words.join(", ")}`);
}

export const drafted = (tree) => tree.tokens.length - 1;

/** What the budget chose for a cycle, and what came of it. */
export const choiceOf = (tree) =>
  tree.steps ? `${tree.steps} steps, ${tree.tokens.length} rows, ${tree.accepted.length} accepted` : "no draft, 1 row";

/** Draw a bar per cycle: its verified rows (the root and the drafted tokens), from below the accepted ones; a line: its steps. */
export function drawBudget(element, cycles, shown) {
  const rows = cycles.map((tree) => tree.tokens.length);
  const steps = cycles.map((tree) => tree.steps);
  const most = Math.max(1, ...rows, ...steps);
  const width = Math.max(cycles.length, LEAST_CYCLES);
  const bars = (heights) => heights.map((height, place) => `M${place + 0.1} ${most}v${-height}h.8V${most}z`).join("");
  const line = steps.map((height, place) => `${place ? "L" : "M"}${place} ${most - height}h1`).join("");
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${most}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  drawn.append(
    svg("rect", { class: "now", x: shown, width: shown < 0 ? 0 : 1, height: most }),
    svg("path", { class: "rows", d: bars(rows) }),
    svg("path", { class: "accepted", d: bars(cycles.map((tree) => tree.accepted.length)) }),
    svg("path", { class: "steps", d: line, "vector-effect": "non-scaling-stroke" }),
  );
  element.replaceChildren(drawn);
  const span = (values) => `${Math.min(...values)} to ${Math.max(...values)}`;
  element.setAttribute("aria-label", cycles.length ? `Per cycle ${span(steps)} steps and ${span(rows)} rows` : "No cycles yet");
}

/** The number of the cycle whose bar is at this share of the width; -1 where there is none. */
export function cycleAt(share, count) {
  const place = Math.floor(share * Math.max(count, LEAST_CYCLES));
  return place < count ? place : -1;
}
