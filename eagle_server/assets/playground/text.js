// The text of an answer, with the origin of each piece.

import { WORDS } from "./layout.js";

/** A piece of an answer, coloured by its origin. */
export function pieceSpan(piece) {
  const span = document.createElement("span");
  span.textContent = piece.text;
  span.className = `${piece.kind} ${piece.cycle % 2 ? "odd" : "even"}`;
  if (piece.cycle >= 0) span.dataset.cycle = piece.cycle;
  span.title = piece.cycle < 0 ? WORDS[piece.kind] : `cycle ${piece.cycle + 1}: ${WORDS[piece.kind]}`;
  return span;
}

/** Shows one answer as it grows: its text, and its reasoning apart. */
export class TextView {
  constructor(text, reasoning) {
    [this.text, this.reasoning] = [text, reasoning];
    this.clear();
  }

  clear() {
    this.shown = 0;
    this.text.replaceChildren();
    this.reasoning.replaceChildren();
    this.reasoning.parentElement.hidden = true;
  }

  update(pieces) {
    for (const isReasoning of [true, false]) {
      const fresh = pieces.slice(this.shown).filter((piece) => piece.reasoning === isReasoning);
      if (!fresh.length) continue;
      const box = isReasoning ? this.reasoning : this.text;
      const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      if (isReasoning) box.parentElement.hidden = false;
      box.append(...fresh.map(pieceSpan));
      if (atEnd) box.scrollTop = box.scrollHeight;
    }
    this.shown = pieces.length;
  }

  /** Underline the pieces of a cycle. */
  mark(cycle) {
    for (const box of [this.text, this.reasoning]) {
      for (const span of box.querySelectorAll(".now")) span.classList.remove("now");
      for (const span of box.querySelectorAll(`[data-cycle="${cycle}"]`)) span.classList.add("now");
    }
  }
}
