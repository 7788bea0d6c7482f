// The view of the draft trees: which cycle is shown, its controls, and the replay.

import { choiceOf, cycleAt, drawBudget } from "./charts.js";
import { drawTree } from "./tree.js";

const $ = (id) => document.getElementById(id);
const REPLAY_MS = 1000;

/** Buttons that are off do nothing but keep the focus: people at a keyboard stay where they are. */
export const switchOff = (id, isOff) => $(id).setAttribute("aria-disabled", isOff);
export const isOff = (id) => $(id).getAttribute("aria-disabled") === "true";

/** Shows the cycles of one answer. onShow(number) is called when another cycle is shown. */
export class Stage {
  constructor(onShow) {
    this.onShow = onShow;
    this.cycles = [];
    this.shown = -1;
    this.follows = true; // the newest cycle is shown as it comes
    this.isRunning = false;
    this.timer = null;
    $("replay").addEventListener("click", () => this.toggleReplay());
    $("cycle").addEventListener("input", () => this.look($("cycle").valueAsNumber));
    $("back").addEventListener("click", () => this.look(this.shown - 1));
    $("on").addEventListener("click", () => this.look(this.shown + 1));
    $("budget").addEventListener("click", (event) => {
      const box = $("budget").getBoundingClientRect();
      this.look(cycleAt((event.clientX - box.left) / box.width, this.cycles.length));
    });
    new ResizeObserver(() => this.#draw()).observe($("tree"));
  }

  /** Show the cycles of a new answer, as they come. */
  begin(cycles) {
    this.stopReplay();
    Object.assign(this, { cycles, shown: -1, follows: true, isRunning: true });
    $("budget-note").textContent = "";
    this.update();
  }

  end() {
    this.isRunning = false;
    this.update();
  }

  /** The answer may have more cycles. */
  update() {
    if (this.follows) this.#show(this.cycles.length - 1);
    else this.#showControls();
  }

  /** Show a cycle that accepted most, with most rows, unless another one was chosen. */
  settle() {
    if (!this.follows || !this.cycles.length) return;
    const better = (a, b) => a.accepted.length - b.accepted.length || a.tokens.length - b.tokens.length;
    this.look(this.cycles.indexOf(this.cycles.reduce((best, tree) => (better(tree, best) > 0 ? tree : best))));
  }

  /** Show a cycle, and stay there. */
  look(number) {
    this.stopReplay();
    this.follows = false;
    this.#show(number);
  }

  get isReplaying() {
    return this.timer !== null;
  }

  toggleReplay() {
    if (this.isReplaying) return this.stopReplay();
    if (isOff("replay")) return;
    document.body.classList.add("replaying");
    this.follows = false;
    $("replay").textContent = "Pause";
    const last = () => this.shown >= this.cycles.length - 1;
    this.#show(last() ? 0 : this.shown + 1);
    this.timer = setInterval(() => (last() ? this.stopReplay() : this.#show(this.shown + 1)), REPLAY_MS);
  }

  stopReplay() {
    clearInterval(this.timer);
    this.timer = null;
    $("replay").textContent = "Replay";
    document.body.classList.remove("replaying");
  }

  #show(number) {
    if (number >= 0 && number < this.cycles.length && number !== this.shown) {
      this.shown = number;
      this.#draw();
      this.onShow(number);
    }
    this.#showControls();
  }

  #draw() {
    const tree = this.cycles[this.shown];
    if (!tree || !$("tree").clientWidth) return;
    drawTree($("tree"), tree, `Cycle ${this.shown + 1}`);
    $("score-note").hidden = !tree.scores;
    $("row-note").hidden = !tree.hasRows;
  }

  #showControls() {
    const { cycles, shown } = this;
    const none = cycles.length === 0;
    drawBudget($("budget"), cycles, shown);
    $("budget-now").textContent = none ? "" : choiceOf(cycles[shown]);
    $("cycle").disabled = none;
    switchOff("replay", none || this.isRunning);
    switchOff("back", shown <= 0);
    switchOff("on", shown >= cycles.length - 1);
    for (const id of ["save-png", "save-gif"]) switchOff(id, none || this.isRunning);
    $("cycle").max = Math.max(cycles.length - 1, 0);
    $("cycle").value = Math.max(shown, 0);
    $("cycle-name").textContent = none ? "" : `cycle ${shown + 1} of ${cycles.length}`;
  }
}
