// Numbers and the histogram of accepted lengths.

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
