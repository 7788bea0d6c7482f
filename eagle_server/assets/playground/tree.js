// A cycle's draft tree as SVG: the root at the left, a column per depth, the accepted path along the top.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 38; // px from leaf to leaf
const HEIGHT = 24; // of a node
const GAP = 40; // between columns
const LETTER = 7.25; // px that a character takes, about
const [SMALLEST, LARGEST] = [0.8, 1.3]; // scale; what is larger than the panel even so is scrolled
const TALLEST = 430; // px that a tree may take before it is drawn smaller
const LONGEST = 16; // characters of a token shown in a node

/** A token's text with its white space visible. */
export function visible(text) {
  const shown = text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍").replace(/ {3,}/g, (run) => `·×${run.length}`);
  const dotted = shown.replace(/ /g, "·");
  return dotted.length > LONGEST ? `${dotted.slice(0, LONGEST - 1)}…` : dotted || "∅";
}

/** Nodes with their places: {text, parent, depth, kind, score, x, y, width}; the bonus, if there is one, is the last. */
export function placed(tree) {
  const path = new Set([0, ...tree.accepted]);
  const nodes = tree.tokens.map((text, number) => ({
    text: visible(text),
    raw: text,
    number,
    parent: tree.parents[number],
    kind: number === 0 ? "root" : path.has(number) ? "accepted" : "refused",
    score: tree.scores ? tree.scores[number] : null,
    children: [],
  }));
  if (tree.bonus !== null) {
    const parent = tree.accepted.at(-1) ?? 0;
    nodes.push({ text: visible(tree.bonus), raw: tree.bonus, number: nodes.length, parent, kind: "bonus", score: null, children: [] });
  }
  for (const node of nodes) {
    node.depth = node.parent < 0 ? 0 : nodes[node.parent].depth + 1;
    node.width = Math.max(30, node.text.length * LETTER + 18);
    if (node.parent >= 0) nodes[node.parent].children.push(node);
  }
  // What the text went on with comes first, so that it runs straight along the top; then by score, or in the drafter's order.
  const off = (node) => (node.kind === "refused" ? 1 : 0);
  for (const node of nodes) node.children.sort((a, b) => off(a) - off(b) || (b.score ?? 0) - (a.score ?? 0) || a.number - b.number);
  placeRows(nodes[0], { next: 0 });
  placeColumns(nodes);
  return nodes;
}

/** A leaf takes the next row, an inner node stands beside its first child. */
function placeRows(node, rows) {
  if (!node.children.length) node.y = rows.next++ * ROW + HEIGHT / 2 + 14;
  for (const child of node.children) placeRows(child, rows);
  if (node.children.length) node.y = node.children[0].y;
}

function placeColumns(nodes) {
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const starts = [2];
  widths.forEach((width, depth) => (starts[depth + 1] = starts[depth] + width + GAP));
  for (const node of nodes) node.x = starts[node.depth];
}

export function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const percent = (score) => {
  const share = 100 * Math.exp(score);
  return share >= 9.95 ? `${share.toFixed(0)}%` : share >= 0.095 ? `${share.toFixed(1)}%` : "<0.1%";
};

function edge(parent, node) {
  const [start, end] = [parent.x + parent.width, node.x];
  const [leave, bend] = [end - GAP, end - GAP / 2]; // straight to the end of the parent's column, then a curve
  const chance = node.score === null || parent.score === null ? 0.4 : Math.exp(Math.min(0, node.score - parent.score));
  const path = element("path", {
    class: `edge ${node.kind}`,
    d: `M${start} ${parent.y}H${leave}C${bend} ${parent.y} ${bend} ${node.y} ${end} ${node.y}`,
    "stroke-width": node.kind === "refused" ? (0.8 + 2 * chance).toFixed(2) : 2.6,
  });
  path.style.setProperty("--depth", node.depth);
  return path;
}

function box(node) {
  const group = element("g", { class: `node ${node.kind}`, transform: `translate(${node.x} ${node.y - HEIGHT / 2})` });
  group.style.setProperty("--depth", node.depth);
  const words = { root: "newest token of the text", accepted: "drafted and accepted", refused: "drafted, not taken", bonus: "drawn by the model itself" };
  const score = node.score === null || node.kind === "root" ? "" : `, log-probability of the path ${node.score.toFixed(2)}`;
  group.append(
    element("title", {}, `${JSON.stringify(node.raw)}: ${words[node.kind]}${score}`),
    element("rect", { width: node.width, height: HEIGHT, rx: 6 }),
    element("text", { x: node.width / 2, y: HEIGHT / 2 + 4.2, "text-anchor": "middle" }, node.text),
  );
  if (score) group.append(element("text", { class: "score", x: node.width / 2, y: -3.5, "text-anchor": "middle" }, percent(node.score)));
  return group;
}

/**
 * Draw a cycle's tree into an element, in place of what it holds. `frame` {width, height}
 * holds a run's trees so far and grows: later ones are drawn no larger, so that they do not jump. Returns the height, px.
 */
export function drawTree(parent, tree, name, frame) {
  const nodes = placed(tree);
  const width = Math.max(...nodes.map((node) => node.x + node.width)) + 2;
  const height = Math.max(...nodes.map((node) => node.y)) + HEIGHT / 2 + 6;
  Object.assign(frame, { width: Math.max(width, frame.width), height: Math.max(height, frame.height) });
  const scale = Math.max(SMALLEST, Math.min(LARGEST, parent.clientWidth / frame.width, TALLEST / frame.height));
  const size = { width: width * scale, height: height * scale };
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, ...size, "aria-hidden": "true" });
  // What was taken lies over what was not.
  const order = (node) => (node.kind === "refused" ? 0 : 1);
  const drawn = nodes.filter((node) => node.parent >= 0).sort((a, b) => order(a) - order(b));
  svg.append(...drawn.map((node) => edge(nodes[node.parent], node)), ...nodes.map(box));
  parent.replaceChildren(svg);
  const path = tree.accepted.map((node) => JSON.stringify(tree.tokens[node])).join(" ") || "none";
  const bonus = tree.bonus === null ? "none" : JSON.stringify(tree.bonus);
  parent.setAttribute("aria-label", `${name}: ${tree.tokens.length - 1} drafted; accepted: ${path}; then the model's own: ${bonus}`);
  return size.height;
}
