// Where the nodes of a cycle's tree are: the root at the left, a column per depth, the accepted path in a straight line.

export const HEIGHT = 28; // px, of a node
export const FONT = 13; // px
export const SMALL = 11; // px, of a node's chance
const LABEL = 20; // px above a tree, for the names of its rows
const [PADDING, SPACE, MARGIN] = [10, 8, 10]; // px: in a node, between its texts, around the tree
const [LEAST_ROW, LARGEST_ROW] = [36, 96]; // px from leaf to leaf
const [LEAST_GAP, LARGEST_GAP] = [26, 190]; // px between columns
const LONGEST = 18; // characters of a token shown in a node

/** What the kinds of nodes are called. */
export const WORDS = { root: "newest token", accepted: "accepted", refused: "refused", bonus: "bonus token", prompt: "first token" };

/** A token's text with its white space visible. */
export function visible(text) {
  const shown = text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍").replace(/ {3,}/g, (run) => `·×${run.length}`);
  const dotted = [...shown.replace(/ /g, "·")];
  return dotted.length > LONGEST ? `${dotted.slice(0, LONGEST - 1).join("")}…` : dotted.join("") || "∅";
}

const percent = (score) => {
  const share = 100 * Math.exp(score);
  return share >= 9.95 ? `${share.toFixed(0)}%` : share >= 0.095 ? `${share.toFixed(1)}%` : "<0.1%";
};

/**
 * Place a tree's nodes so that it fills an area {width, height}; what cannot is larger than the area, and is scrolled.
 * measure(text, px) is the width of a text. Returns {nodes, labels, width, height}; a node is {text, raw, kind, number,
 * parent, depth, score, chance, x, y, width}, y its middle. The bonus token, if there is one, is the last node. A label
 * {text, words, x, y} names the row that scored a column, where the drafter has rows.
 */
export function layout(tree, area, measure) {
  const nodes = nodesOf(tree);
  for (const node of nodes) {
    node.textWidth = measure(node.text, FONT);
    node.width = Math.max(34, node.textWidth + (node.chance ? SPACE + measure(node.chance, SMALL) : 0) + 2 * PADDING);
  }
  const [rows, top] = [placeRows(nodes), tree.hasRows ? LABEL : 0];
  const row = between(LEAST_ROW, (area.height - top - 2 * MARGIN - HEIGHT) / Math.max(rows - 1, 1), LARGEST_ROW);
  const tall = top + (rows - 1) * row + HEIGHT + 2 * MARGIN;
  const height = Math.max(tall, area.height);
  const first = (height - tall) / 2 + top + MARGIN;
  for (const node of nodes) node.y = first + HEIGHT / 2 + node.row * row;
  const width = placeColumns(nodes, area.width);
  return { nodes, height, width, labels: tree.hasRows ? labelsOf(nodes, first - LABEL) : [] };
}

/** The rows of scores that a tree's columns were drafted from. The bonus token is the target's own. */
function labelsOf(nodes, y) {
  const columns = new Map();
  for (const node of nodes) {
    if (node.kind === "accepted" || node.kind === "refused") columns.set(node.depth, [...(columns.get(node.depth) ?? []), node]);
  }
  return [...columns].map(([depth, column]) => {
    const taken = column.find(({ kind }) => kind === "accepted");
    const said = taken ? `${JSON.stringify(taken.raw)} accepted` : "none accepted";
    return { text: `row ${depth}`, words: `row ${depth}: ${column.length} verified, ${said}`, x: column[0].x, y };
  });
}

const between = (least, value, most) => Math.min(most, Math.max(least, value));

function nodesOf(tree) {
  const path = new Set(tree.accepted);
  const nodes = tree.tokens.map((raw, number) => ({
    raw,
    number,
    parent: tree.parents[number],
    kind: number === 0 ? "root" : path.has(number) ? "accepted" : "refused",
    score: tree.scores ? tree.scores[number] : null,
  }));
  if (tree.bonus !== null) {
    nodes.push({ raw: tree.bonus, number: nodes.length, parent: tree.accepted.at(-1) ?? 0, kind: "bonus", score: null });
  }
  for (const node of nodes) {
    node.text = visible(node.raw);
    node.chance = node.score === null || node.kind === "root" ? "" : percent(node.score);
    node.depth = node.parent < 0 ? 0 : nodes[node.parent].depth + 1;
    node.children = [];
    if (node.parent >= 0) nodes[node.parent].children.push(node);
  }
  return nodes;
}

/**
 * Give each node its row, and return how many there are. An inner node stands beside the child that was taken, else in
 * the middle of its children. Subtrees are as close as the columns allow, in the same order in each column, so that no
 * edges cross. About half of the leaves are above the accepted path, the likeliest next to it.
 */
function placeRows(nodes) {
  const balance = { above: 0, below: 0 };
  const place = (node) => {
    const refused = node.children.filter((child) => child.kind === "refused");
    refused.sort((a, b) => (b.score ?? 0) - (a.score ?? 0) || a.number - b.number);
    const taken = node.children.find((child) => child.kind !== "refused");
    const sides = { above: [], below: [] };
    for (const child of refused) {
      const side = taken && balance.above < balance.below ? "above" : "below";
      if (taken) balance[side] += leaves(child);
      sides[side].push(child);
    }
    const start = taken ?? sides.below.shift();
    const extent = start ? place(start) : new Map();
    for (const child of sides.below) attach(extent, place(child), 1);
    for (const child of sides.above) attach(extent, place(child), -1);
    const rows = node.children.map((child) => child.row);
    node.row = start ? (taken ? taken.row : (Math.min(...rows) + Math.max(...rows)) / 2) : 0;
    extent.set(node.depth, { first: node.row, last: node.row, nodes: [node] });
    return extent;
  };
  place(nodes[0]);
  const first = Math.min(...nodes.map((node) => node.row));
  for (const node of nodes) node.row -= first;
  return Math.max(...nodes.map((node) => node.row)) + 1;
}

const leaves = (node) => (node.children.length ? node.children.reduce((sum, child) => sum + leaves(child), 0) : 1);

/** Move a subtree below (direction 1) or above (-1) of what is in `extent`, the first and last row by depth, and add it. */
function attach(extent, subtree, direction) {
  const distances = [...subtree].filter(([depth]) => extent.has(depth)).map(([depth, { first, last }]) => {
    const other = extent.get(depth);
    return direction > 0 ? other.last - first + 1 : last - other.first + 1;
  });
  const shift = direction * Math.max(...distances);
  for (const [depth, { first, last, nodes }] of subtree) {
    for (const node of nodes) node.row += shift;
    const other = extent.get(depth) ?? { first: Infinity, last: -Infinity, nodes: [] };
    extent.set(depth, {
      first: Math.min(other.first, first + shift),
      last: Math.max(other.last, last + shift),
      nodes: [...other.nodes, ...nodes],
    });
  }
}

function placeColumns(nodes, available) {
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const taken = widths.reduce((sum, width) => sum + width, 0) + 2 * MARGIN;
  const gap = between(LEAST_GAP, (available - taken) / Math.max(widths.length - 1, 1), LARGEST_GAP);
  const wide = taken + gap * (widths.length - 1);
  const width = Math.max(wide, available);
  let left = (width - wide) / 2 + MARGIN;
  const columns = widths.map((each) => {
    const column = { left, right: left + each };
    left += each + gap;
    return column;
  });
  for (const node of nodes) {
    node.x = columns[node.depth].left;
    node.columnEnd = columns[node.depth].right;
  }
  return width;
}

/** The edge to a node: from its parent straight to the end of the parent's column, then a curve. */
export function edgeOf(parent, node) {
  const middle = (parent.columnEnd + node.x) / 2;
  const chance = node.score === null || parent.score === null ? 0.4 : Math.exp(Math.min(0, node.score - parent.score));
  return {
    from: [parent.x + parent.width, parent.y],
    leave: [parent.columnEnd, parent.y],
    bends: [[middle, parent.y], [middle, node.y]],
    to: [node.x, node.y],
    weight: node.kind === "refused" ? 0.8 + 2 * chance : 2.6,
  };
}

/** Where the two texts of a node begin. */
export function textsOf(node) {
  const chance = node.chance ? node.x + node.width - PADDING : null;
  return { token: node.chance ? node.x + PADDING : node.x + (node.width - node.textWidth) / 2, chance };
}

/** Nodes and edges in the order to draw them: what was taken lies over what was refused. */
export const inOrder = (nodes) => [...nodes].sort((a, b) => (a.kind === "refused" ? 0 : 1) - (b.kind === "refused" ? 0 : 1));
