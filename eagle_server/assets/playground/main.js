// The playground: the form, a run, and what is shown of it.

import { Answer } from "./answer.js";
import { cycleAt, drafted, drawBudget, drawHistogram, rounded, speed } from "./readings.js";
import { events, get, Refusal } from "./server.js";
import { drawTree } from "./tree.js";

const $ = (id) => document.getElementById(id);
const REPLAY_MS = 1000;

const state = {
  answer: new Answer(), // the speculative one that is shown
  plain: null,
  frame: { width: 0, height: 0 }, // px, of the trees shown
  shown: -1, // the cycle whose tree is shown
  follows: true, // the newest cycle is shown as it comes
  deepest: 0,
  running: null, // the AbortController of a run
  replay: null,
  due: false, // a frame is requested
  spans: 0, // pieces that have their span
};

// --- What is served ---

const key = () => $("key").value.trim(); // pasted ones come with white space

async function greet() {
  try {
    const info = await get("v1/server_info", key());
    const serving = info.serving ?? {};
    state.deepest = serving.num_steps ?? 0;
    $("served").textContent = [info.model, serving.speculative_algorithm, state.deepest ? `${state.deepest} steps` : ""].filter(Boolean).join(" · ");
    if (serving.max_request_tokens) $("max_tokens").max = serving.max_request_tokens;
    drawHistogram($("histogram"), [], state.deepest);
    const tokenizer = await get("tokenizer_info", key());
    $("mode").hidden = !tokenizer.chat_template;
    complain(null);
  } catch (error) {
    complain(error);
  }
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

function request(seed) {
  const chat = !$("mode").hidden && document.querySelector("input[name=mode]:checked").value === "chat";
  const prompt = $("prompt").value;
  const body = {
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: $("max_tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    top_p: $("top_p").valueAsNumber,
    seed,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  return [chat ? "v1/chat/completions" : "v1/completions", body];
}

const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

async function run() {
  if (state.running || !$("form").reportValidity()) return;
  const typed = $("seed").valueAsNumber;
  const seed = Number.isNaN(typed) ? randomSeed() : typed;
  const [path, body] = request(seed);
  const [secret, compares] = [key(), $("compare").checked];
  begin(compares);
  const signal = state.running.signal;
  try {
    for await (const event of events(path, { ...body, return_trees: true }, secret, signal)) {
      state.answer.take(event, performance.now());
      changed();
    }
    if (compares) {
      say("the same request, without speculation …");
      state.plain = new Answer();
      for await (const event of events(path, { ...body, speculative: false }, secret, signal)) {
        state.plain.take(event, performance.now());
        changed();
      }
      judge();
    }
    say(`done, seed ${seed}`);
  } catch (error) {
    if (error.name === "AbortError") say("stopped");
    else {
      say("failed");
      complain(error);
    }
  } finally {
    end();
  }
}

function begin(compares) {
  stopReplay();
  complain(null);
  Object.assign(state, { answer: new Answer(), plain: null, frame: { width: 0, height: 0 }, shown: -1, follows: true, running: new AbortController(), spans: 0 });
  $("text").replaceChildren();
  $("plain").textContent = "";
  $("verdict").textContent = "";
  $("verdict").className = "";
  $("comparison").hidden = !compares;
  $("tree").style.minHeight = "";
  switchOff("run", true);
  switchOff("stop", false);
  document.body.classList.add("running");
  say("running …");
  changed();
}

function end() {
  state.running = null;
  switchOff("run", false);
  switchOff("stop", true);
  document.body.classList.remove("running");
  changed();
}

function judge() {
  const same = state.plain.text === state.answer.text;
  const ratio = state.answer.speed && state.plain.speed ? state.answer.speed / state.plain.speed : null;
  $("verdict").textContent = same ? `identical text${ratio ? `, ${ratio.toFixed(2)} × the speed of plain decoding` : ""}` : "the texts differ";
  $("verdict").className = same ? "good" : "bad";
  $("plain-answer").open = !same;
}

const say = (words) => ($("status").textContent = words);

// --- Showing ---

/** Something is new: show it with the next frame. */
function changed() {
  if (state.due) return;
  state.due = true;
  requestAnimationFrame(() => {
    state.due = false;
    show();
  });
}

function show() {
  const { answer, plain } = state;
  showText();
  if (state.follows) select(answer.cycles.length - 1);
  else showControls();
  $("speed").textContent = speed(answer.speed);
  $("length").textContent = rounded(answer.meanLength, 2);
  $("count").textContent = answer.cycles.length || "–";
  drawHistogram($("histogram"), answer.histogram, state.deepest);
  if (!plain && $("comparison").hidden) return;
  const most = Math.max(answer.speed ?? 0, plain?.speed ?? 0, 1);
  for (const [name, value] of [["speculative", answer.speed], ["plain", plain?.speed ?? null]]) {
    $(`bar-${name}`).style.width = `${(100 * (value ?? 0)) / most}%`;
    $(`speed-${name}`).textContent = value === null ? "–" : `${speed(value)} tok/s`;
  }
  if (plain) $("plain").textContent = plain.text;
}

function showText() {
  const fresh = state.answer.pieces.slice(state.spans).map((piece) => {
    const span = document.createElement("span");
    span.textContent = piece.text;
    span.className = `${piece.kind} ${piece.cycle % 2 ? "odd" : "even"}`;
    if (piece.cycle >= 0) {
      span.dataset.cycle = piece.cycle;
      const words = piece.kind === "accepted" ? "drafted and accepted" : "drawn by the model itself";
      span.title = `cycle ${piece.cycle + 1}: ${words}`;
    } else span.title = "from the prompt's pass";
    return span;
  });
  if (!fresh.length) return;
  const text = $("text");
  const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  text.append(...fresh);
  if (atEnd) text.scrollTop = text.scrollHeight;
  state.spans += fresh.length;
}

/** Show a cycle's tree, and where in the text it is. */
function select(number) {
  const { answer } = state;
  if (number >= 0 && number < answer.cycles.length && number !== state.shown) {
    const tree = answer.cycles[number];
    const height = drawTree($("tree"), tree, `Cycle ${number + 1}`, state.frame);
    // The panel grows to the highest tree and stays so: nothing below it jumps.
    const least = Math.max(parseFloat($("tree").style.minHeight) || 0, height + 16);
    $("tree").style.minHeight = `${least}px`;
    $("score-note").hidden = !tree.scores;
    for (const span of $("text").querySelectorAll(".now")) span.classList.remove("now");
    for (const span of $("text").querySelectorAll(`[data-cycle="${number}"]`)) span.classList.add("now");
    state.shown = number;
  }
  showControls();
}

function showControls() {
  const cycles = state.answer.cycles;
  const count = cycles.length;
  const none = count === 0;
  drawBudget($("budget"), cycles, state.shown);
  const tree = cycles[state.shown];
  $("budget-now").textContent = tree ? `this one ${drafted(tree)}, accepted ${tree.accepted.length}` : "";
  $("cycle").disabled = none;
  switchOff("replay", none || state.running !== null);
  switchOff("back", none || state.shown <= 0);
  switchOff("on", none || state.shown >= count - 1);
  $("cycle").max = Math.max(count - 1, 0);
  $("cycle").value = Math.max(state.shown, 0);
  $("cycle-name").textContent = none ? "" : `cycle ${state.shown + 1} of ${count}`;
}

/** Buttons that are off do nothing but keep the focus: people at a keyboard stay where they are. */
const switchOff = (id, isOff) => $(id).setAttribute("aria-disabled", isOff);

function look(number) {
  state.follows = false;
  select(number);
}

function stopReplay() {
  clearInterval(state.replay);
  state.replay = null;
  $("replay").textContent = "Replay";
  document.body.classList.remove("replaying");
}

function toggleReplay() {
  if (state.replay) return stopReplay();
  if (state.running || !state.answer.cycles.length) return;
  document.body.classList.add("replaying");
  look(state.shown >= state.answer.cycles.length - 1 ? 0 : state.shown + 1);
  $("replay").textContent = "Pause";
  state.replay = setInterval(() => {
    if (state.shown >= state.answer.cycles.length - 1) stopReplay();
    else look(state.shown + 1);
  }, REPLAY_MS);
}

// --- Wiring ---

const stop = () => (state.running ? state.running.abort() : stopReplay());

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("stop").addEventListener("click", stop);
$("replay").addEventListener("click", toggleReplay);
$("key").addEventListener("change", greet);
$("cycle").addEventListener("input", () => (stopReplay(), look($("cycle").valueAsNumber)));
$("back").addEventListener("click", () => (stopReplay(), look(state.shown - 1)));
$("on").addEventListener("click", () => (stopReplay(), look(state.shown + 1)));
$("budget").addEventListener("click", (event) => {
  const box = $("budget").getBoundingClientRect();
  const cycle = cycleAt((event.clientX - box.left) / box.width, state.answer.cycles.length);
  if (cycle >= 0) (stopReplay(), look(cycle));
});
for (const kind of ["mouseover", "click"]) {
  $("text").addEventListener(kind, (event) => {
    const cycle = event.target.dataset?.cycle;
    if (cycle === undefined || state.replay || (kind === "mouseover" && state.running)) return;
    look(Number(cycle));
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
  if (event.key === "Escape") stop();
});

greet();
