// The race: both answers side by side, each as fast as the engine decoded it, or both slower by the same factor.
//
// Each ran alone on the engine: side by side they would share its cycles, and the plain one would pay for the drafts.

import { duration, speed, tokens } from "./charts.js";
import { pieceSpan } from "./text.js";
import { switchOff } from "./stage.js";

const $ = (id) => document.getElementById(id);
const LEAST_SECONDS = 4; // the speculative answer takes at least as long on the screen
const FRAME_MS = 50; // few frames, as drawing may take the cores that the engine decodes with

const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Race {
  constructor() {
    this.lanes = [];
    this.answers = null;
    this.timer = null;
    $("race-again").addEventListener("click", () => this.start());
  }

  clear(words) {
    this.stop();
    this.answers = this.ahead = null;
    for (const name of ["speculative", "plain"]) this.#reset(name);
    $("race-note").textContent = words;
    switchOff("race-again", true);
  }

  /** Show the speculative answer as it comes, before the race. */
  preview(answer) {
    this.ahead ??= laneOf("speculative", answer);
    this.#advance(this.ahead, Infinity, Infinity);
  }

  /** Take the answers of a new race. The plain one may still be running: the clock waits for it. */
  begin(speculative, plain) {
    this.answers = { speculative, plain };
  }

  stop() {
    clearInterval(this.timer);
  }

  start() {
    if (!this.answers) return;
    this.stop();
    const { speculative, plain } = this.answers;
    this.lanes = [laneOf("speculative", speculative), laneOf("plain", plain)];
    for (const lane of this.lanes) this.#reset(lane.name);
    switchOff("race-again", false);
    const slower = niceFactor(LEAST_SECONDS / speculative.seconds);
    const pace = slower > 1 ? `shown ${slower} × slower than it ran` : "shown as fast as it ran";
    $("race-note").textContent = `Each ran alone on the engine; ${pace}.`;
    let [clock, newest] = [0, performance.now()];
    this.timer = setInterval(() => {
      const now = performance.now();
      clock = calm.matches ? Infinity : clock + (now - newest) / 1000 / slower;
      if (!plain.done) clock = Math.min(clock, plain.seconds);
      newest = now;
      for (const lane of this.lanes) this.#advance(lane, clock, speculative.decoded || 1); // both get as many tokens
      if (plain.done && this.lanes.every((lane) => lane.shown === lane.answer.pieces.length)) this.stop();
    }, FRAME_MS);
  }

  #reset(name) {
    $(`race-${name}`).replaceChildren();
    $(`race-${name}-count`).textContent = "–";
    $(`race-${name}-bar`).style.width = "0";
  }

  /** Show what a lane's answer had after so many seconds, and in its bar the share of `total` tokens. */
  #advance(lane, clock, total) {
    const { name, answer } = lane;
    const from = lane.shown;
    while (lane.shown < answer.pieces.length && answer.pieces[lane.shown].at <= clock) lane.shown++;
    while (lane.cycle < answer.cycles.length && answer.cycles[lane.cycle].seconds <= clock) {
      const { accepted, bonus } = answer.cycles[lane.cycle++];
      lane.tokens += accepted.length + (bonus !== null);
    }
    const pre = $(`race-${name}`);
    if (lane.shown > from) {
      pre.append(...answer.pieces.slice(from, lane.shown).map(pieceSpan));
      pre.scrollTop = pre.scrollHeight;
    }
    $(`race-${name}-bar`).style.width = `${Math.min(100, (100 * lane.tokens) / total)}%`;
    const ended = answer.done && lane.shown === answer.pieces.length;
    const seconds = ended ? answer.seconds : Math.min(clock, answer.seconds);
    $(`race-${name}-count`).textContent = ended
      ? `${speed(answer.speed)} tokens/s · ${duration(seconds)}`
      : `${tokens(lane.tokens + 1)} · ${duration(seconds)}`;
  }
}

/** How far an answer is shown: its first pieces, cycles and tokens. */
const laneOf = (name, answer) => ({ name, answer, shown: 0, cycle: 0, tokens: 0 });

/** A factor of at least 1 that reads well. */
function niceFactor(wanted) {
  if (!(wanted > 1) || !Number.isFinite(wanted)) return 1;
  return wanted < 10 ? Math.ceil(wanted) : Math.ceil(wanted / 5) * 5;
}
