// Pictures of cycles on a canvas, and their files: a PNG of one cycle, an animated GIF of all.

import { Gif } from "./gif.js";
import { edgeOf, FONT, HEIGHT, inOrder, layout, SMALL, textsOf, visible, WORDS } from "./layout.js";
import { measure, summary } from "./tree.js";

const [WIDTH, TREE_HEIGHT] = [880, 320]; // px, at least
const [HEAD, FOOT, EDGE] = [40, 64, 20]; // px: above the tree, below it, left and right
const FRAME_MS = 900;
const LAST_MS = 3000;

function colors() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

const area = { width: WIDTH - 2 * EDGE, height: TREE_HEIGHT };

/** The size of a picture that has room for each of these trees. */
function sizeFor(trees) {
  const sizes = trees.map((tree) => layout(tree, area, measure));
  return { width: Math.max(...sizes.map(({ width }) => width)), height: Math.max(...sizes.map(({ height }) => height)) };
}

/** Paint a cycle of an answer: its counts, its tree, the newest text. size: of the tree's area; scale: pixels per px. */
function paint(canvas, answer, number, size, scale) {
  const [width, height] = [size.width + 2 * EDGE, size.height + HEAD + FOOT];
  Object.assign(canvas, { width: width * scale, height: height * scale });
  const [pen, color] = [canvas.getContext("2d", { willReadFrequently: true }), colors()];
  const font = (px, weight = 400) => (pen.font = `${weight} ${px}px ${color("mono")}`);
  pen.scale(scale, scale);
  pen.textBaseline = "middle";
  pen.fillStyle = color("card");
  pen.fillRect(0, 0, width, height);
  const tree = answer.cycles[number];
  const title = `cycle ${number + 1} of ${answer.cycles.length}`;
  font(FONT, 600);
  pen.fillStyle = color("ink");
  pen.fillText(title, EDGE, HEAD / 2);
  const after = EDGE + pen.measureText(`${title}  `).width;
  font(FONT);
  pen.fillStyle = color("quiet");
  pen.fillText(summary(tree), after, HEAD / 2);
  pen.save();
  pen.translate(EDGE, HEAD);
  paintTree(pen, layout(tree, size, measure), color, font);
  pen.restore();
  paintLegend(pen, width, color, font);
  paintText(pen, answer, number, { width, y: height - FOOT / 2 }, color, font);
}

function paintTree(pen, { nodes, labels }, color, font) {
  for (const node of inOrder(nodes.filter((each) => each.parent >= 0))) {
    const { from, leave, bends, to, weight } = edgeOf(nodes[node.parent], node);
    pen.strokeStyle = color(node.kind === "refused" ? "refused-line" : node.kind);
    pen.lineWidth = weight;
    pen.setLineDash(node.kind === "bonus" ? [5, 4] : []);
    pen.beginPath();
    pen.moveTo(...from);
    pen.lineTo(...leave);
    pen.bezierCurveTo(...bends.flat(), ...to);
    pen.stroke();
  }
  pen.setLineDash([]);
  font(SMALL);
  pen.fillStyle = color("quiet");
  for (const { text, x, y } of labels) pen.fillText(text, x, y);
  const fills = { root: "ink", accepted: "accepted-soft", bonus: "bonus-soft", refused: "card" };
  const lines = { root: "ink", accepted: "accepted", bonus: "bonus", refused: "refused-line" };
  for (const node of nodes) {
    pen.fillStyle = color(fills[node.kind]);
    pen.strokeStyle = color(lines[node.kind]);
    pen.lineWidth = node.kind === "refused" ? 1 : 1.6;
    pen.beginPath();
    pen.roundRect(node.x, node.y - HEIGHT / 2, node.width, HEIGHT, 7);
    pen.fill();
    pen.stroke();
    const at = textsOf(node);
    font(FONT);
    pen.fillStyle = color({ root: "card", refused: "quiet" }[node.kind] ?? "ink");
    pen.fillText(node.text, at.token, node.y + 0.5);
    if (!node.chance) continue;
    font(SMALL);
    pen.textAlign = "right";
    pen.fillStyle = color(node.kind === "accepted" ? "accepted" : "quiet");
    pen.fillText(node.chance, at.chance, node.y + 0.5);
    pen.textAlign = "left";
  }
}

function paintLegend(pen, width, color, font) {
  let x = width - EDGE;
  font(SMALL);
  for (const kind of ["refused", "bonus", "accepted"]) {
    x -= pen.measureText(WORDS[kind]).width;
    pen.fillStyle = color("quiet");
    pen.fillText(WORDS[kind], x, HEAD / 2);
    pen.fillStyle = color(kind === "refused" ? "card" : `${kind}-soft`);
    pen.strokeStyle = color(kind === "refused" ? "refused-line" : kind);
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.roundRect(x - 20, HEAD / 2 - 5, 13, 10, 3);
    pen.fill();
    pen.stroke();
    x -= 38;
  }
}

/** The end of the text after a cycle, with the cycle's own pieces coloured. */
function paintText(pen, answer, number, place, color, font) {
  font(FONT);
  let x = place.width - EDGE;
  const pieces = answer.pieces.filter((piece) => piece.cycle <= number).reverse();
  const width = pieces.reduce((sum, piece) => sum + pen.measureText(visible(piece.text)).width, 0);
  x = Math.min(x, EDGE + width);
  for (const piece of pieces) {
    const text = visible(piece.text);
    const wide = pen.measureText(text).width;
    if (x - wide < EDGE) break;
    x -= wide;
    const isNew = piece.cycle === number && piece.kind !== "prompt";
    if (isNew) {
      pen.fillStyle = color(`${piece.kind}-soft`);
      pen.fillRect(x, place.y - 11, wide, 22);
    }
    pen.fillStyle = color(isNew ? "ink" : "quiet");
    pen.fillText(text, x, place.y);
  }
}

/** A PNG of one cycle. */
export function png(answer, number) {
  const canvas = document.createElement("canvas");
  paint(canvas, answer, number, sizeFor([answer.cycles[number]]), 2);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

/** An animated GIF of all cycles. onFrame(number) is called before each; the page stays responsive. */
export async function gif(answer, onFrame) {
  const canvas = document.createElement("canvas");
  const size = sizeFor(answer.cycles);
  let file = null;
  for (let number = 0; number < answer.cycles.length; number++) {
    onFrame(number);
    await new Promise((done) => setTimeout(done));
    paint(canvas, answer, number, size, 1);
    file ??= new Gif(canvas.width, canvas.height);
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    file.add(data, number === answer.cycles.length - 1 ? LAST_MS : FRAME_MS);
  }
  return new Blob(file.end(), { type: "image/gif" });
}

/** Let the browser save a file. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
