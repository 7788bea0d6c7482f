// A cycle's draft tree as SVG.

import { edgeOf, HEIGHT, inOrder, layout, textsOf, WORDS } from "./layout.js";

const SVG = "http://www.w3.org/2000/svg";
const BASELINE = 4.5; // px from a text's middle to its baseline

export function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

let pen = null;

/** The width of a text in the font of the trees, px. */
export function measure(text, size) {
  pen ??= document.createElement("canvas").getContext("2d");
  pen.font = `${size}px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`;
  return pen.measureText(text).width;
}

/** A cycle in words. */
export function summary(tree) {
  const bonus = tree.bonus === null ? "" : " + bonus token";
  return `${tree.tokens.length - 1} drafted, ${tree.accepted.length} accepted${bonus}`;
}

function edge(parent, node) {
  const { from, leave, bends, to, weight } = edgeOf(parent, node);
  const path = element("path", {
    class: `edge ${node.kind}`,
    d: `M${from}L${leave}C${bends.join(" ")} ${to}`,
    "stroke-width": weight.toFixed(2),
  });
  path.style.setProperty("--depth", node.depth);
  return path;
}

function box(node, hasRows) {
  const group = element("g", { class: `node ${node.kind}` });
  group.style.setProperty("--depth", node.depth);
  const score = node.chance ? `, log of the path's chance ${node.score.toFixed(2)}` : "";
  const row = hasRows && ["accepted", "refused"].includes(node.kind) ? `, scored by row ${node.depth}` : "";
  const at = textsOf(node);
  group.append(
    element("title", {}, `${JSON.stringify(node.raw)}: ${WORDS[node.kind]}${row}${score}`),
    element("rect", { x: node.x, y: node.y - HEIGHT / 2, width: node.width, height: HEIGHT, rx: 7 }),
    element("text", { x: at.token, y: node.y + BASELINE }, node.text),
  );
  if (node.chance) group.append(element("text", { class: "chance", x: at.chance, y: node.y + BASELINE - 0.5 }, node.chance));
  return group;
}

function label({ text, words, x, y }) {
  const made = element("text", { class: "row", x, y: y + BASELINE }, text);
  made.append(element("title", {}, words));
  return made;
}

/** Draw a cycle's tree into an element, in place of what it holds. It fills the element, and is scrolled if it is larger. */
export function drawTree(parent, tree, name) {
  const area = { width: parent.clientWidth, height: parent.clientHeight };
  const { nodes, labels, width, height } = layout(tree, area, measure);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  const edges = inOrder(nodes.filter((node) => node.parent >= 0)).map((node) => edge(nodes[node.parent], node));
  svg.append(...edges, ...nodes.map((node) => box(node, tree.hasRows)), ...labels.map(label));
  parent.replaceChildren(svg);
  parent.scrollTop = nodes[0].y - area.height / 2;
  const path = tree.accepted.map((node) => JSON.stringify(tree.tokens[node])).join(" ") || "none";
  const bonus = tree.bonus === null ? "none" : JSON.stringify(tree.bonus);
  const rows = labels.map(({ words }) => `. ${words}`).join("");
  parent.setAttribute("aria-label", `${name}: ${summary(tree)}. Accepted: ${path}. Bonus token: ${bonus}${rows}`);
}
