// The form: its values, the example prompts, and the link that restores them.

const $ = (id) => document.getElementById(id);
const FIELDS = ["max_tokens", "temperature", "top_p", "seed"];

const EXAMPLES = {
  completion: {
    Class: "class Queue:\n    def __init__(self, maxsize=0):\n",
    JSON: "def read_json(path):\n    ",
    Test: "import unittest\n\nclass TestQueue(unittest.TestCase):\n    def test_put(self):\n",
    Docs: 'def fibonacci(n):\n    """',
    List: "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ",
  },
  chat: {
    Explain: "Explain speculative decoding in three sentences.",
    Code: "Write a Python function that reads a JSON file.",
    Table: "List the planets with their diameters as a Markdown table.",
    Repeat: "Repeat this line five times: to be or not to be",
  },
};

export const mode = () => (!$("mode").hidden && document.querySelector("input[name=mode]:checked").value) || "completion";

/** The endpoint and the body of the request that the form describes. */
export function request(seed) {
  const prompt = $("prompt").value;
  const chat = mode() === "chat";
  const body = {
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: $("max_tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    top_p: $("top_p").valueAsNumber,
    seed,
    stream: true,
    return_trees: true,
  };
  return [chat ? "v1/chat/completions" : "v1/completions", body];
}

/** The seed of the next run. */
export function seed() {
  const typed = $("seed").valueAsNumber;
  return Number.isNaN(typed) ? crypto.getRandomValues(new Uint32Array(1))[0] : typed;
}

/** A URL of this page that restores the form; never with the API key. */
export function link(view) {
  const values = new URLSearchParams({ prompt: $("prompt").value });
  for (const name of FIELDS) values.set(name, $(name).value);
  if (mode() === "chat") values.set("mode", "chat");
  if (!$("compare").checked) values.set("compare", "0");
  if (view !== "trees") values.set("view", view);
  return `${location.href.split("#")[0]}#${values}`;
}

/** Fill the form with what the page's URL says. Returns the view that it names, and the values that no field takes. */
export function restore() {
  const values = new URLSearchParams(location.hash.slice(1));
  const old = FIELDS.map((name) => [name, $(name).value]);
  const refused = [];
  if (values.has("prompt")) $("prompt").value = values.get("prompt");
  for (const [name, before] of old) {
    if (!values.has(name)) continue;
    const given = values.get(name);
    $(name).value = given; // the browser drops what is no number
    if ($(name).checkValidity() && Boolean($(name).value) === Boolean(given)) continue;
    const why = $(name).validationMessage.replace(/\.$/, ""); // the browser's words
    $(name).value = before;
    refused.push(`${name} ${given}${why && ` (${why})`}`);
  }
  if (values.has("prompt")) $("compare").checked = values.get("compare") !== "0";
  if (values.get("mode") === "chat") document.querySelector("input[name=mode][value=chat]").checked = true;
  showExamples();
  return { view: values.get("view") === "race" ? "race" : "trees", refused };
}

/** Show the example prompts of the chosen endpoint. */
export function showExamples() {
  const examples = Object.entries(EXAMPLES[mode()]);
  $("prompt").value ||= examples[0][1];
  const buttons = examples.map(([name, prompt]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => {
      $("prompt").value = prompt;
      $("prompt").focus();
    });
    return button;
  });
  $("examples").replaceChildren(...buttons);
}

/** Another endpoint was chosen: it has its own examples. A prompt that was typed stays. */
export function changeMode() {
  if (Object.values(EXAMPLES).some((each) => Object.values(each).includes($("prompt").value))) $("prompt").value = "";
  showExamples();
}
