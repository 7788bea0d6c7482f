// One request's answer as it comes: its text cut into pieces that know their origin, its cycles, its clock.

/** An answer. A piece is {text, kind, cycle}: kind "accepted", "bonus", or "prompt" for the token of the prompt's pass. */
export class Answer {
  constructor() {
    this.pieces = [];
    this.cycles = [];
    this.tokens = 0;
    this.histogram = [];
    this.began = null; // when the first token was there, ms
    this.firstTokens = 0;
    this.newest = null;
  }

  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  /** Tokens per second after the first event, which waits for the prompt; null while nothing can be said. */
  get speed() {
    const seconds = (this.newest - this.began) / 1000;
    return seconds > 0 ? (this.tokens - this.firstTokens) / seconds : null;
  }

  /** Tokens per pass of the model, the bonus included; null before the first cycle. */
  get meanLength() {
    if (!this.cycles.length) return null;
    const accepted = this.cycles.reduce((sum, tree) => sum + tree.accepted.length, 0);
    return 1 + accepted / this.cycles.length;
  }

  /** Take an event of a stream in; now in ms. */
  take(event, now) {
    if (event.usage && event.usage.completion_tokens > this.tokens) {
      this.tokens = event.usage.completion_tokens;
      this.newest = now;
      if (this.began === null) [this.began, this.firstTokens] = [now, this.tokens];
    }
    const choice = event.choices[0];
    if (!choice) return;
    const text = choice.text ?? choice.delta?.content ?? "";
    const trees = choice.trees ?? [];
    if (!trees.length) {
      if (text) this.pieces.push({ text, kind: "prompt", cycle: -1 });
      return;
    }
    let rest = text;
    for (const tree of trees) rest = this.#cycle(tree, rest);
    // What no token's own spelling explains: characters of several tokens, and text that was held back.
    if (rest) this.pieces.push({ text: rest, kind: "bonus", cycle: this.cycles.length - 1 });
  }

  #cycle(tree, text) {
    const number = this.cycles.push(tree) - 1;
    const length = tree.accepted.length;
    this.histogram[length] = (this.histogram[length] ?? 0) + 1;
    const said = tree.accepted.map((node) => [tree.tokens[node], "accepted"]);
    if (tree.bonus !== null) said.push([tree.bonus, "bonus"]);
    for (const [token, kind] of said) {
      if (!text.startsWith(token)) break;
      this.pieces.push({ text: token, kind, cycle: number });
      text = text.slice(token.length);
    }
    return text;
  }
}
