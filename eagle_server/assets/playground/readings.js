// Numbers, the histogram of accepted lengths, and the drafted tokens of each cycle.

import { element as svg } from "./tree.js";

const LEAST_CYCLES = 48; // a bar is no wider than with so many

export const rounded = (value, digits) => (value === null ? "–" : value.toFixed(digits));
export const speed = (value) => (value === null ? "–" : value >= 100 ? value.toFixed(0) : value.toFixed(1));

/** Draw bars of how many cycles accepted 0, 1, ... drafts; deepest is the most there can be. */
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
  element.setAttribute("aria-label", `Cycles by accepted drafts: ${words.join(", ")}`);
}

export const drafted = (tree) => tree.tokens.length - 1;

/** Draw a bar per cycle: how many tokens it drafted, and from below how many of them were accepted. shown is marked. */
export function drawBudget(element, cycles, shown) {
  const counts = cycles.map(drafted);
  const most = Math.max(1, ...counts);
  const width = Math.max(cycles.length, LEAST_CYCLES);
  const bars = (heights) => heights.map((height, place) => `M${place + 0.1} ${most}v${-height}h.8V${most}z`).join("");
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${most}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  drawn.append(
    svg("rect", { class: "now", x: shown, width: shown < 0 ? 0 : 1, height: most }),
    svg("path", { class: "drafted", d: bars(counts) }),
    svg("path", { class: "accepted", d: bars(cycles.map((tree) => tree.accepted.length)) }),
  );
  element.replaceChildren(drawn);
  const mean = counts.reduce((sum, count) => sum + count, 0) / counts.length;
  const words = `${Math.min(...counts)} to ${Math.max(...counts)} per cycle, ${mean.toFixed(1)} on average`;
  element.setAttribute("aria-label", counts.length ? `Drafted tokens: ${words}` : "No cycles yet");
}

/** The number of the cycle whose bar is at this share of the width; -1 where there is none. */
export function cycleAt(share, count) {
  const place = Math.floor(share * Math.max(count, LEAST_CYCLES));
  return place < count ? place : -1;
}
