// The playground: a run of the form's request, its verdict, and what is shown of it.

import { Answer } from "./answer.js";
import { drawHistogram, duration, rounded, speed, tokens } from "./charts.js";
import { comparison, PAIRS, repeats, speeds } from "./comparison.js";
import { changeMode, link, request, restore, seed, showExamples } from "./form.js";
import { gif, png, save } from "./picture.js";
import { Race } from "./race.js";
import { events, get, Refusal } from "./server.js";
import { isOff, Stage, switchOff } from "./stage.js";
import { TextView } from "./text.js";

const $ = (id) => document.getElementById(id);
const SHOW_MS = 120;
const LONGEST_LINK = 32_000; // characters

const state = {
  answer: new Answer(), // the speculative one
  plain: null,
  pairs: [], // of answers, [speculative, plain], that were not drawn while they came
  deepest: 0, // levels that the server drafts at most, 0 without a drafter
  hasRows: false, // whether the server drafts from one row of scores per level
  lossy: false, // whether the server's acceptance rule changes texts
  running: null, // the AbortController of a run
  due: false, // `show` will run
  view: "trees",
};
const text = new TextView($("text"), $("reasoning-text"));
const stage = new Stage((number) => text.mark(number));
const race = new Race();

// --- What is served ---

const key = () => $("key").value.trim(); // pasted ones come with white space

async function greet() {
  try {
    const info = await get("v1/server_info", key());
    const serving = info.serving ?? {};
    state.deepest = serving.num_steps ?? 0;
    state.hasRows = info.resolved?.speculative?.has_rows ?? false;
    state.lossy = info.config.speculative.acceptance !== "lossless";
    $("served").textContent = [info.model, serving.speculative_algorithm, state.deepest ? `up to ${state.deepest} steps` : ""].filter(Boolean).join(" · ");
    if (serving.max_request_tokens) limitTokens(serving.max_request_tokens);
    takeDefaults(info.resolved?.model?.sampling_defaults ?? {});
    drawHistogram($("histogram"), [], state.deepest);
    const tokenizer = await get("tokenizer_info", key());
    $("mode").hidden = !tokenizer.chat_template;
    showExamples();
    complain(null);
  } catch (error) {
    complain(error);
  }
}

/** The model's own sampling, in the fields that nobody has changed. */
function takeDefaults(defaults) {
  for (const name of ["temperature", "top_p"]) {
    const field = $(name);
    if (name in defaults && field.value === field.defaultValue) field.value = field.defaultValue = defaults[name];
  }
}

/** A link may ask for more tokens than this server gives. */
function limitTokens(most) {
  const field = $("max_tokens");
  field.max = most;
  if (!(field.valueAsNumber > most)) return;
  remark(`This server gives ${tokens(most)} at most, not ${field.value}.`);
  field.value = most;
}

/** Show what an adaptive budget chooses now, in the server's words. Returns how much faster than plain decoding it expects to be. */
async function showBudget() {
  const { engine } = await get("v1/server_info", key());
  const { choice, steps, tokens_per_second: rate, plain_tokens_per_second: plain } = engine.speculation ?? {};
  const fixed = state.deepest ? "Fixed budget" : "This server has no drafter";
  $("budget-note").textContent = choice ? `Adaptive budget: ${choice}` : fixed;
  return steps && plain ? rate / plain : undefined;
}

/** Add a sentence about what the form could not take. */
function remark(words) {
  $("remark").append(`${words} `);
  $("remark").hidden = false;
}

function clearRemarks() {
  $("remark").replaceChildren();
  $("remark").hidden = true;
}

function complain(error) {
  const words = error === null ? "" : error instanceof Refusal ? error.message : `The page failed: ${error}`;
  if (error !== null && !(error instanceof Refusal)) console.error(error);
  $("error").textContent = words;
  $("error").hidden = !words;
  if (error?.status === 401) {
    // The server's words are for programs.
    $("key-field").hidden = false;
    $("error").textContent = "The server does not accept this API key.";
    $("error").hidden = !key(); // without one the field says it
    $("key").focus();
  }
}

// --- A run ---

async function run() {
  if (state.running || !$("form").reportValidity()) return;
  const drawn = seed();
  const [path, body] = request(drawn);
  const [secret, compares] = [key(), $("compare").checked];
  showLink();
  begin();
  const take = async (answer, speculative, onEvent = () => {}) => {
    for await (const event of events(path, { ...body, speculative }, secret, state.running.signal)) {
      answer.take(event);
      onEvent();
    }
    answer.done = true;
  };
  const began = performance.now();
  try {
    judge("Decoding …", "with speculation");
    await take(state.answer, true, changed);
    if (compares) {
      judge("Decoding …", "the same request without speculation");
      state.plain = new Answer();
      race.begin(state.answer, state.plain);
      if (state.view === "race") race.start();
      await take(state.plain, false, changed);
      show();
      await measure(take, performance.now() - began).catch(unlessStopped); // with the pairs until then
    }
    show();
    conclude(await showBudget().catch(complain));
    stage.settle();
    say(`done, seed ${drawn}`);
  } catch (error) {
    const stopped = error.name === "AbortError";
    say(stopped ? "stopped" : "failed");
    if (!stopped) complain(error);
    judge(stopped ? "Stopped" : "Failed", "");
  } finally {
    end();
  }
}

/** Run both again: the first pair was drawn, by cores that the engine may need. took: milliseconds of that pair. */
async function measure(take, took) {
  const { answer, plain, pairs } = state;
  if (!answer.drafted || !plain.speed || answer.everything !== plain.everything) return;
  document.body.classList.remove("running"); // the answer is complete
  const tell = () => {
    conclude();
    $("verdict-note").append(" …");
    say(`measuring: ${pairs.length} of ${PAIRS} pairs …`);
  };
  tell();
  for await (const pair of repeats(take, took)) {
    const other = pair.find((each) => each.everything !== answer.everything);
    if (other) return void (state.plain = other); // the verdict shows where it differs
    pairs.push(pair);
    tell();
  }
}

function unlessStopped(error) {
  if (error.name !== "AbortError") throw error;
}

function begin() {
  complain(null);
  clearRemarks();
  Object.assign(state, { answer: new Answer(state.hasRows), plain: null, pairs: [], running: new AbortController() });
  text.clear();
  stage.begin(state.answer.cycles);
  race.clear($("compare").checked ? "The race starts when the speculative answer is complete." : "A race needs “Compare with plain decoding”.");
  $("speeds").hidden = false;
  $("speeds").classList.toggle("alone", !$("compare").checked);
  switchOff("run", true);
  switchOff("stop", false);
  document.body.classList.add("running");
  say("running …");
  changed();
}

function end() {
  state.running = null;
  if (state.plain) state.plain.done = true;
  stage.end();
  switchOff("run", false);
  switchOff("stop", true);
  document.body.classList.remove("running");
  changed();
}

function judge(verdict, note, className = "") {
  $("verdict").textContent = verdict;
  $("verdict").className = className;
  $("verdict-note").textContent = note;
}

/** The pairs whose speeds count: the first one only where no other ran. */
const counted = () => (state.pairs.length ? state.pairs : [[state.answer, state.plain]]);

/** The verdict on a complete run. expected: the speed over that of plain decoding by the engine's costs, if it knows. */
function conclude(expected) {
  const { answer, plain } = state;
  const took = `${tokens(answer.decoded)} in ${duration(answer.seconds)} of engine time`;
  if (!plain) return judge(answer.speed ? `${speed(answer.speed)} tokens/s` : "Done", took);
  const [ours, theirs] = [answer.everything, plain.everything];
  if (ours !== theirs) {
    const place = [...ours].findIndex((character, at) => character !== theirs[at]);
    const where = `from character ${(place < 0 ? ours.length : place) + 1} on`;
    return judge("The texts differ", state.lossy ? `${where}: this server's acceptance rule is lossy` : where, "bad");
  }
  if (!answer.drafted) return judge("Identical text", answer.speed ? `${took}; nothing was drafted` : "");
  const { ratio, note, className } = comparison(counted(), expected);
  judge(ratio === null ? "Identical text" : `Identical text, ${ratio.toFixed(2)} ×`, note, className);
}

const say = (words) => ($("status").textContent = words);

// --- Showing ---

/** Something is new: show it soon. Not at once, as drawing may take the cores that the engine decodes with. */
function changed() {
  if (state.due) return;
  state.due = true;
  setTimeout(() => {
    state.due = false;
    show();
  }, SHOW_MS);
}

function show() {
  const { answer, plain } = state;
  text.update(answer.pieces);
  stage.update();
  if (state.running && !plain && state.view === "race") race.preview(answer);
  $("length").textContent = rounded(answer.meanLength, 2);
  $("count").textContent = answer.cycles.length || "–";
  $("drafted").textContent = answer.cycles.length ? answer.drafted : "–";
  $("accepted").textContent = answer.cycles.length ? answer.accepted : "–";
  drawHistogram($("histogram"), answer.histogram, state.deepest);
  const shown = plain?.speed ? speeds(counted()) : [answer.speed, null];
  const most = Math.max(...shown, 1);
  for (const [place, name] of ["speculative", "plain"].entries()) {
    const value = shown[place];
    $(`bar-${name}`).style.width = `${(100 * (value ?? 0)) / most}%`;
    $(`speed-${name}`).textContent = value === null ? "–" : `${speed(value)} tokens/s`;
  }
}

function choose(view) {
  state.view = view;
  for (const name of ["trees", "race"]) {
    const chosen = name === view;
    $(`view-${name}`).classList.toggle("away", !chosen);
    $(`tab-${name}`).setAttribute("aria-selected", chosen);
    $(`tab-${name}`).tabIndex = chosen ? 0 : -1;
  }
  $("cycles").hidden = view !== "trees";
  if (view === "race") race.start();
  else race.stop();
}

// --- Wiring ---

function stop() {
  if (state.running) return state.running.abort();
  stage.stopReplay();
  race.stop();
}

/** Put the form's link into the address bar, unless it is too long for browsers. Returns whether it is there. */
function showLink() {
  const url = link(state.view);
  if (url.length > LONGEST_LINK) return false;
  history.replaceState(null, "", url);
  return true;
}

/** Fill the form from the page's URL, and say what of it cannot be taken. */
function restored() {
  const { view, refused } = restore();
  clearRemarks();
  if (refused.length) remark(`Not taken from the link: ${refused.join(", ")}.`);
  return view;
}

async function share() {
  const copy = () => navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  // Browsers let pages copy over HTTPS and on localhost.
  $("share").textContent = !showLink() ? "Prompt too long" : (await copy()) ? "Copied" : "In the address bar";
  setTimeout(() => ($("share").textContent = "Copy link"), 2000);
}

async function saveGif() {
  if (isOff("save-gif")) return;
  const { answer } = state;
  switchOff("save-gif", true);
  const file = await gif(answer, (number) => ($("save-gif").textContent = `GIF ${number + 1}/${answer.cycles.length}`));
  save(file, "draft-trees.gif");
  $("save-gif").textContent = "Save GIF";
  switchOff("save-gif", false);
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("stop").addEventListener("click", stop);
$("share").addEventListener("click", share);
$("key").addEventListener("change", greet);
$("mode").addEventListener("change", changeMode);
$("save-png").addEventListener("click", async () => {
  if (!isOff("save-png")) save(await png(state.answer, stage.shown), `cycle-${stage.shown + 1}.png`);
});
$("save-gif").addEventListener("click", saveGif);
for (const view of ["trees", "race"]) {
  $(`tab-${view}`).addEventListener("click", () => choose(view));
  $(`tab-${view}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = view === "trees" ? "race" : "trees";
    choose(other);
    $(`tab-${other}`).focus();
  });
}
for (const box of [$("text"), $("reasoning-text")]) {
  for (const kind of ["mouseover", "click"]) {
    box.addEventListener(kind, (event) => {
      const cycle = event.target.dataset?.cycle;
      if (cycle === undefined || stage.isReplaying || (kind === "mouseover" && state.running)) return;
      stage.look(Number(cycle));
    });
  }
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
  if (event.key === "Escape") stop();
});
addEventListener("hashchange", () => choose(restored()));

choose(restored());
greet();
