// One request's answer as it comes: its text cut into pieces that know their origin, and its cycles with their times.

/**
 * An answer. A piece is {text, kind, cycle, at, reasoning}. kind: "accepted", "bonus", or "prompt" for the token of the
 * prompt's pass. at: seconds in the engine since the first token. reasoning: it is not part of the answer's text.
 */
export class Answer {
  /** hasRows: row k of the drafter scored all drafted tokens of level k. */
  constructor(hasRows = false) {
    this.hasRows = hasRows;
    this.pieces = [];
    this.cycles = [];
    this.histogram = [];
    this.drafted = 0;
    this.accepted = 0;
    this.decoded = 0; // tokens after the first one
    this.done = false;
  }

  get text() {
    return this.pieces.filter((piece) => !piece.reasoning).map((piece) => piece.text).join("");
  }

  /** All that was generated, reasoning included: what two answers are compared by. */
  get everything() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  /** Seconds in the engine from the first token to the newest one. */
  get seconds() {
    return this.cycles.at(-1)?.seconds ?? 0;
  }

  /** Tokens per second in the engine, after the first token; null before the first cycle. */
  get speed() {
    return this.seconds > 0 ? this.decoded / this.seconds : null;
  }

  /** Tokens per cycle, the bonus token included; null before the first cycle. */
  get meanLength() {
    return this.cycles.length ? 1 + this.accepted / this.cycles.length : null;
  }

  /** Take an event of a stream in. */
  take(event) {
    const choice = event.choices[0];
    if (!choice) return;
    const parts = [
      { text: choice.delta?.reasoning_content ?? "", reasoning: true },
      { text: choice.text ?? choice.delta?.content ?? "", reasoning: false },
    ];
    const trees = choice.trees ?? [];
    // The first token comes from the prompt's pass. It is the root of the first tree.
    if (trees.length && !this.pieces.length) this.#say(parts, trees[0].tokens[0], { kind: "prompt", cycle: -1, at: 0 });
    for (const tree of trees) this.#cycle(tree, parts);
    // What no token's own spelling explains: characters of several tokens, and text that was held back.
    const cycle = this.cycles.length - 1;
    const origin = { kind: cycle < 0 ? "prompt" : "bonus", cycle, at: this.seconds };
    for (const part of parts) if (part.text) this.pieces.push({ ...origin, ...part });
  }

  #cycle(tree, parts) {
    const cycle = this.cycles.push({ ...tree, hasRows: this.hasRows }) - 1;
    const length = tree.accepted.length;
    this.histogram[length] = (this.histogram[length] ?? 0) + 1;
    this.drafted += tree.tokens.length - 1;
    this.accepted += length;
    this.decoded += length + (tree.bonus !== null);
    for (const node of tree.accepted) this.#say(parts, tree.tokens[node], { kind: "accepted", cycle, at: tree.seconds });
    if (tree.bonus !== null) this.#say(parts, tree.bonus, { kind: "bonus", cycle, at: tree.seconds });
  }

  /** Cut a token off the first part that is left. A token that it does not begin with has no text of its own here. */
  #say(parts, token, origin) {
    const part = parts.find((each) => each.text);
    if (!token || !part?.text.startsWith(token)) return;
    this.pieces.push({ text: token, reasoning: part.reasoning, ...origin });
    part.text = part.text.slice(token.length);
  }
}
