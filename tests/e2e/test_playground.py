"""The playground in a real browser: an installed Chromium, controlled by playwright (`pip install -e '.[browser]'`)."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.conftest import README_FLAGS, Served, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 60_000  # ms

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="needs the package playwright"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """The page. It must load nothing from other hosts and report no error. `options`: of the browser's context."""
    page = browser.new_page(**{"viewport": {"width": 390, "height": 844}, **options})
    page.set_default_timeout(PATIENCE)
    complaints: list[str] = []
    refused = "Failed to load resource"  # Chromium's message for an error response, which the page shows itself
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text)
            if message.type == "error" and not message.text.startswith(refused)
            else None
        ),
    )
    own = (url.partition("#")[0], f"blob:{url.partition('#')[0]}")
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(own) else complaints.append(request.url))
    page.goto(url)
    yield page
    page.close()
    assert complaints == []


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    with opened(browser, served.url) as page:
        page.locator("#served", has_text="demo").wait_for()
        yield page


def run(page: Any, tokens: int) -> None:
    page.fill("#max_tokens", str(tokens))
    page.click("#run")
    page.locator("#status", has_text="done").wait_for()


def fits(page: Any) -> bool:
    """Whether nothing is wider than the screen."""
    return bool(page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"))


def test_a_run_shows_its_trees_and_the_same_text_from_plain_decoding(page: Any) -> None:
    assert fits(page)
    page.fill("#max_tokens", "40")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.locator("#status", has_text="done").wait_for()
    assert re.match(r"Identical text(, \d+\.\d\d ×)?$", page.inner_text("#verdict"))
    note = r"(\d+\.\d\d × )?the speed of plain decoding, in engine time: (one pair|[2-5] pairs) of runs"
    assert re.match(note, page.inner_text("#verdict-note"))
    page.locator("#histogram b", has_text=re.compile(r"\d")).first.wait_for()
    cycles = int(page.inner_text("#count"))
    counts = [int(text or 0) for text in page.locator("#histogram b").all_inner_texts()]
    assert sum(counts) == cycles
    assert 1 + sum(length * count for length, count in enumerate(counts)) / cycles == pytest.approx(
        float(page.inner_text("#length")), abs=0.01
    )
    # The tree of README_FLAGS has 13 nodes, its root included. The last ones have only what the answer may keep.
    assert 12 * (cycles - 3) <= int(page.inner_text("#drafted")) <= 12 * cycles
    assert int(page.inner_text("#accepted")) == sum(length * count for length, count in enumerate(counts))
    assert fits(page)

    page.focus("#cycle")
    page.keyboard.press("Home")
    assert page.inner_text("#cycle-name") == f"cycle 1 of {cycles}"
    page.focus("#back")
    page.keyboard.press("Enter")  # there is no earlier cycle; a disabled button must keep the focus
    assert page.evaluate("() => document.activeElement.id") == "back"
    assert page.inner_text("#cycle-name") == f"cycle 1 of {cycles}"
    said = page.locator("#text [data-cycle='0']")
    accepted, bonus = page.locator("#tree .node.accepted"), page.locator("#tree .node.bonus")
    assert accepted.count() + bonus.count() == said.count()
    assert page.inner_text("#budget-now") == f"3 steps, 13 rows, {accepted.count()} accepted"
    assert page.inner_text("#budget-note") == "Fixed budget"
    assert page.locator("#tree .node").count() == 13 + 1  # the tree, and the bonus token
    assert page.get_attribute("#budget path.rows", "d").count("M") == cycles  # a bar per cycle
    later = page.locator("#text [data-cycle]:not([data-cycle='0'])").filter(has_text=re.compile(r"\w")).first
    later.click()
    assert page.inner_text("#cycle-name") == f"cycle {int(later.get_attribute('data-cycle')) + 1} of {cycles}"


def test_speeds_are_those_of_the_engines_clock(page: Any) -> None:
    streams: list[Any] = []
    page.on("response", lambda response: streams.append(response) if "completions" in response.url else None)
    run(page, 24)
    speeds = defaultdict[bool, list[float]](list)
    for stream in streams:
        events = [json.loads(line.removeprefix("data: ")) for line in stream.text().split("\n\n")[:-2]]
        trees = [tree for event in events for choice in event["choices"] for tree in choice["trees"]]
        tokens = sum(len(tree["accepted"]) + (tree["bonus"] is not None) for tree in trees)
        assert tokens == 23  # the first token comes from the prompt
        speculative = json.loads(stream.request.post_data)["speculative"]
        speeds[speculative].append(tokens / trees[-1]["seconds"])
    assert 1 <= len(speeds[True]) == len(speeds[False]) <= 1 + 5
    if len(speeds[True]) > 1:  # the first pair was drawn
        speeds = {speculative: measured[1:] for speculative, measured in speeds.items()}
    for name, measured in (("speculative", speeds[True]), ("plain", speeds[False])):
        shown = float(page.inner_text(f"#speed-{name}").removesuffix(" tokens/s"))
        assert shown == pytest.approx(statistics.median(measured), rel=0.01)


COMPARISON = """async ([runs, expected]) => {
    const { comparison } = await import("/playground/comparison.js");
    const pairs = runs.map(([ours, theirs, meanLength]) => [{ speed: ours, meanLength }, { speed: theirs }]);
    return comparison(pairs, expected ?? undefined);
}"""
UNSURE = ": the runs vary too much on this machine to tell"


@pytest.mark.parametrize(
    ("runs", "expected", "ratio", "says", "colour"),
    [
        ([(200, 100, 3), (300, 100, 3.5), (180, 120, 3)], 1.5, 2.0, "3 pairs of runs, 1.50 to 3.00 ×", "good"),
        ([(90, 100, 3), (120, 100, 3), (80, 100, 3)], None, 0.9, f"0.80 to 1.20 ×{UNSURE}", ""),
        ([(90, 100, 3), (92, 100, 3)], 0.9, 0.91, "2 pairs of runs, 0.90 to 0.92 ×", ""),
        ([(90, 100, 3), (92, 100, 3)], 1.96, 0.91, f"0.90 to 0.92 ×; the engine expects 1.96 ×{UNSURE}", ""),
        ([(120, 100, 3), (130, 100, 3)], 0.9, 1.25, f"1.20 to 1.30 ×; the engine expects 0.90 ×{UNSURE}", ""),
        ([(400, 100, 3), (500, 100, 4), (450, 100, 5)], 2.0, None, f", above 4.00 tokens per cycle{UNSURE}", ""),
        ([(400, 100, 3.8)], 2.0, None, f"one pair of runs, above 3.80 tokens per cycle{UNSURE}", ""),
        ([(400, 100, 5)], 2.0, 4.0, "one pair of runs", ""),
    ],
)
def test_a_verdict_is_a_median_with_its_spread_and_names_no_cause(
    page: Any, runs: list[tuple[float, ...]], expected: float | None, ratio: float | None, says: str, colour: str
) -> None:
    found = page.evaluate(COMPARISON, [runs, expected])
    assert (found["ratio"], found["className"]) == (ratio and pytest.approx(ratio), colour)
    assert "the speed of plain decoding, in engine time: " in found["note"]
    assert found["note"].endswith(says)


def stream_of(text: str, seconds: float, accepted: int) -> str:
    """A made-up completion of 13 tokens: the prompt's, then cycles of that many accepted tokens and a bonus token."""
    parents, nodes = list(range(-1, accepted)), list(range(1, accepted + 1))
    chain = {"tokens": ["a"] * (accepted + 1), "parents": parents, "scores": None, "steps": accepted, "bonus": "a"}
    cycles = 12 // (accepted + 1)
    trees = [{**chain, "accepted": nodes, "seconds": seconds * (at + 1) / cycles} for at in range(cycles)]
    return f"data: {json.dumps({'choices': [{'text': text, 'trees': trees}]})}\n\ndata: [DONE]\n\n"


def speculations(
    page: Any, *, first_seconds: float = 1.0, plain_seconds: float = 2.0, answered: int = 12, other: int = 0
) -> list[bool]:
    """Answer completions with made-up streams: 12 tokens in 1 s with speculation. Returns whether each asked for it.

    first_seconds: of the first one. answered: the later ones stay open. other: the number of one with another text.
    """
    asked: list[bool] = []

    def answer(route: Any) -> None:
        asked.append(json.loads(route.request.post_data)["speculative"])
        if len(asked) > answered:
            return
        text = "a" * 12 + ("b" if len(asked) == other else "a")
        seconds = (first_seconds if len(asked) == 1 else 1.0) if asked[-1] else plain_seconds
        route.fulfill(body=stream_of(text, seconds, 3 if asked[-1] else 0))

    page.route("**/v1/completions", answer)
    return asked


def test_pairs_alternate_and_the_drawn_one_does_not_count(page: Any) -> None:
    asked = speculations(page, first_seconds=40.0)
    page.evaluate("() => (performance.now = () => 0)")  # however slow this machine is
    run(page, 13)
    assert asked == [True, False, *[False, True, True, False] * 2, False, True]
    assert page.inner_text("#verdict") == "Identical text, 2.00 ×"
    assert page.inner_text("#verdict-note").endswith("5 pairs of runs, 2.00 to 2.00 ×")
    assert page.get_attribute("#verdict", "class") == "good"
    assert [page.inner_text(f"#speed-{name}") for name in ("speculative", "plain")] == ["12.0 tokens/s", "6.0 tokens/s"]


def test_long_answers_are_not_repeated(page: Any) -> None:
    asked = speculations(page)
    page.evaluate("() => { let now = 0; performance.now = () => (now += 20_000); }")  # ms
    run(page, 13)
    assert asked == [True, False]
    assert page.inner_text("#verdict-note").endswith(": one pair of runs")


def test_a_measurement_that_contradicts_the_engines_costs_is_no_verdict(page: Any) -> None:
    def answer(route: Any) -> None:
        info = route.fetch().json()
        info["engine"]["speculation"] = {
            "choice": "on: 3 steps; 202 tokens/s against 103 expected for 1 request",
            "steps": 3,
            "tokens_per_second": 202.0,
            "plain_tokens_per_second": 103.0,
        }
        route.fulfill(json=info)

    page.route("**/v1/server_info", answer)
    speculations(page, plain_seconds=0.54)
    run(page, 13)
    assert page.inner_text("#verdict") == "Identical text, 0.54 ×"
    assert page.inner_text("#verdict-note").endswith(f"; the engine expects 1.96 ×{UNSURE}")
    assert "202 tokens/s against 103" in page.inner_text("#budget-note")


def test_stopping_the_repeats_keeps_the_verdict_so_far(page: Any) -> None:
    speculations(page, answered=4)
    page.evaluate("() => (performance.now = () => 0)")
    page.fill("#max_tokens", "13")
    page.click("#run")
    page.locator("#status", has_text="measuring: 1 of 5 pairs").wait_for()
    assert page.inner_text("#verdict-note").endswith(": one pair of runs …")
    page.keyboard.press("Escape")
    page.locator("#status", has_text="done").wait_for()
    assert page.inner_text("#verdict") == "Identical text, 2.00 ×"
    assert page.inner_text("#verdict-note").endswith(": one pair of runs")


def test_a_repeat_with_another_text_is_told(page: Any) -> None:
    asked = speculations(page, other=4)
    page.evaluate("() => (performance.now = () => 0)")
    run(page, 13)
    assert len(asked) == 4
    assert page.inner_text("#verdict") == "The texts differ"
    assert page.inner_text("#verdict-note") == "from character 13 on"


def test_what_cannot_be_taken_from_a_link_is_said(browser: Any, served: Served) -> None:
    with opened(browser, f"{served.url}/#prompt=x&seed=9007199254740993&max_tokens=1000000000") as page:
        remark = page.locator("#remark", has_text=re.compile(r"gives \d+ tokens at most, not 1000000000\.")).first
        remark.wait_for()
        assert re.match(r"Not taken from the link: seed 9007199254740993 \(.*9007199254740991", remark.inner_text())
        place = remark.bounding_box()
        assert place["y"] + place["height"] < 844  # on a phone's first screen
        assert page.input_value("#seed") == "7"
        assert 1 < int(page.input_value("#max_tokens")) < 1_000_000_000
        page.evaluate("() => (location.hash = '#prompt=y')")
        remark.wait_for(state="hidden")


def test_a_link_restores_prompt_parameters_and_view_and_has_no_key(page: Any, browser: Any) -> None:
    prompt = "a = 'é & #?+\\n'\n    "
    page.fill("#prompt", prompt)
    for name, value in {"max_tokens": "17", "temperature": "0.25", "top_p": "0.9", "seed": ""}.items():
        page.fill(f"#{name}", value)
    page.check("input[value=chat]")
    page.uncheck("#compare")
    page.click("#tab-race")
    page.evaluate("() => (document.getElementById('key').value = 'secret')")
    page.click("#share")
    page.locator("#share", has_text=re.compile("Copied|In the address bar")).wait_for()
    assert "secret" not in page.url
    with opened(browser, page.url) as other:
        other.locator("#mode").wait_for()
        assert other.input_value("#prompt") == prompt
        values = {name: other.input_value(f"#{name}") for name in ("max_tokens", "temperature", "top_p", "seed")}
        assert values == {"max_tokens": "17", "temperature": "0.25", "top_p": "0.9", "seed": ""}
        assert other.is_checked("input[value=chat]")
        assert not other.is_checked("#compare")
        assert other.get_attribute("#tab-race", "aria-selected") == "true"
    address = page.url
    page.fill("#prompt", "too long " * 5000)
    page.click("#share")
    page.locator("#share", has_text="Prompt too long").wait_for()
    assert page.url == address
    with opened(browser, page.url.partition("#")[0] + "#prompt=x&top_p=7&max_tokens=many") as other:
        assert [other.input_value(f"#{name}") for name in ("prompt", "top_p", "max_tokens")] == ["x", "1", "96"]


def test_an_example_fills_the_prompt_and_every_endpoint_has_its_own(page: Any) -> None:
    examples = page.locator("#examples button")
    examples.nth(1).click()
    assert page.input_value("#prompt").startswith("def read_json")
    completions = examples.all_inner_texts()
    page.check("input[value=chat]")
    assert page.input_value("#prompt") == "Explain speculative decoding in three sentences."
    assert not set(completions) & set(examples.all_inner_texts())
    page.fill("#prompt", "my own")
    page.check("input[value=completion]")
    assert page.input_value("#prompt") == "my own"


def test_the_race_shows_both_answers_grow_by_the_engines_clock(page: Any) -> None:
    page.click("#tab-race")
    run(page, 32)
    assert fits(page)
    text = page.text_content("#text")
    page.locator("#race-plain-count", has_text="tokens/s").wait_for()
    page.locator("#race-speculative-count", has_text="tokens/s").wait_for()
    assert page.text_content("#race-speculative") == page.text_content("#race-plain") == text != ""
    page.click("#race-again")
    slow = page.locator("#race-speculative-count", has_text=re.compile(r"^(1 token|\d+ tokens) · \d"))
    slow.wait_for()
    assert text.startswith(page.text_content("#race-plain"))
    assert len(page.text_content("#race-plain")) < len(text)
    page.keyboard.press("Tab")  # the tabs are reached and changed with the keyboard
    page.focus("#tab-race")
    page.keyboard.press("ArrowLeft")
    assert page.is_visible("#tree") and not page.is_visible("#race-plain")


def test_the_race_is_over_at_once_for_people_who_want_no_motion(browser: Any, served: Served) -> None:
    with opened(browser, f"{served.url}/#view=race", reduced_motion="reduce") as page:
        run(page, 32)
        page.locator("#race-plain-count", has_text="tokens/s").wait_for(timeout=1000)
        assert page.text_content("#race-speculative") == page.text_content("#text")


def test_pictures_of_the_trees_are_saved(page: Any, tmp_path: Path) -> None:
    run(page, 16)
    files = {}
    for kind in ("png", "gif"):
        with page.expect_download() as download:
            page.click(f"#save-{kind}")
        files[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[kind])
    assert files["png"].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert files["gif"].read_bytes().startswith(b"GIF89a")
    with Image.open(files["png"]) as png:
        assert png.width >= 2 * 880
        assert {(255, 255, 255), (213, 239, 229)} <= {color[:3] for _, color in png.getcolors(2**24)}  # paper, accepted
    with Image.open(files["gif"]) as gif:
        assert gif.n_frames == int(page.inner_text("#count"))
        for frame in range(gif.n_frames):
            gif.seek(frame)
            colors = gif.convert("RGB").getcolors(2**24)
            assert max(colors)[1] == (255, 255, 255)
            assert gif.info["duration"] == (3000 if frame == gif.n_frames - 1 else 900)


def tree_of(parents: list[int], accepted: list[int], token: str = " token") -> dict[str, Any]:
    scores = [0.0]
    for parent in parents[1:]:
        scores.append(scores[parent] - 0.7)
    tokens = [f"{token}{node}" for node in range(len(parents))]
    return {"tokens": tokens, "parents": parents, "scores": scores, "accepted": accepted, "bonus": "\n\n", "steps": 1}


SHAPES = {
    "root alone": tree_of([-1], []),
    "chain": tree_of(list(range(-1, 8)), [1, 2, 3]),
    "star": tree_of([-1] + [0] * 24, [9]),
    "full": tree_of([-1] + [node // 2 for node in range(30)], [2, 6]),
    "wide characters": tree_of([-1, 0, 0, 1, 1, 2, 2], [1], "文字化け"),
    "long tokens": tree_of([-1, 0, 0, 1, 1, 2, 2, 3, 3], [], "internationalization"),
    "as drafted": tree_of([-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 8, 10, 10, 11, 13, 13, 14, 16], [1, 4, 7, 10]),
}
DRAW = """async ([tree, width]) => {
    const { drawTree } = await import("/playground/tree.js");
    const panel = document.getElementById("tree");
    panel.style.width = `${width}px`;
    drawTree(panel, tree, "Cycle 1");
    const box = (each) => {
        const { x, y, width, height } = each.getBoundingClientRect();
        return [x, y, width, height];
    };
    return {
        panel: [panel.clientWidth, panel.clientHeight],
        nodes: [...panel.querySelectorAll(".node")].map((node) => ({
            rect: box(node.querySelector("rect")), texts: [...node.querySelectorAll("text")].map(box) })),
    };
}"""


@pytest.mark.parametrize("width", [340, 900])
def test_no_label_touches_another_and_the_tree_fills_its_panel(page: Any, width: int) -> None:
    for shape, tree in SHAPES.items():
        drawn = page.evaluate(DRAW, [tree, width])
        rects, texts = [node["rect"] for node in drawn["nodes"]], [node["texts"] for node in drawn["nodes"]]
        assert len(rects) == len(tree["tokens"]) + 1
        for node, rect in enumerate(rects):
            assert all(not overlap(rect, other) for other in rects[:node]), shape
            for place, text in enumerate(texts[node]):
                assert rect[0] < text[0] and text[0] + text[2] < rect[0] + rect[2], f"{shape}: a label leaves its node"
                assert all(not overlap(text, other) for other in texts[node][:place]), shape
        spread = [max(r[axis] + r[axis + 2] for r in rects) - min(r[axis] for r in rects) for axis in (0, 1)]
        columns, rows = (len({round(rect[axis]) for rect in rects}) for axis in (0, 1))
        assert spread[0] > (0.9 if columns > 4 else 0.3) * drawn["panel"][0], shape
        assert spread[1] > (0.8 if rows > 4 else 0.05) * drawn["panel"][1], shape


def overlap(a: list[float], b: list[float]) -> bool:
    return all(a[i] < b[i] + b[i + 2] and b[i] < a[i] + a[i + 2] for i in (0, 1))


def test_reasoning_is_shown_apart_from_the_answer(page: Any) -> None:
    """The stream is made up: the demo does not reason."""

    def event(delta: dict[str, str], *tokens: str) -> str:
        """An event; of the tokens the first is the root, the last the bonus token, and those between are accepted."""
        chain = {"tokens": tokens[:-1], "parents": list(range(-1, len(tokens) - 2)), "scores": None, "steps": 2}
        tree = {**chain, "accepted": list(range(1, len(tokens) - 1)), "bonus": tokens[-1], "seconds": 0.01}
        return f"data: {json.dumps({'choices': [{'delta': delta, 'trees': [tree]}]})}\n\n"

    body = event({"reasoning_content": "Let me see."}, "Let", " me", " see", ".")
    body += event({"reasoning_content": " Yes", "content": "It is"}, ".", " Yes", "</think>", "It", " is")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"{body}data: [DONE]\n\n"))
    page.check("input[value=chat]")
    run(page, 12)
    assert page.inner_text("#verdict").startswith("Identical text")
    page.locator("#text", has_text="It is").wait_for()
    assert page.text_content("#reasoning-text") == "Let me see. Yes"
    assert page.text_content("#text") == "It is"
    assert page.locator("#reasoning-text .accepted").all_inner_texts() == [" me", " see", " Yes"]
    assert page.locator("#text .accepted").all_inner_texts() == ["It"]
    assert page.locator("#text .bonus").all_inner_texts() == [" is"]


def test_escape_stops_a_run(page: Any) -> None:
    page.fill("#max_tokens", "400")
    page.click("#run")
    page.locator("#tree svg").wait_for()
    page.keyboard.press("Escape")
    page.locator("#status", has_text="stopped").wait_for()
    assert page.get_attribute("#run", "aria-disabled") == "false"


def test_chats_and_errors(page: Any) -> None:
    page.check("input[value=chat]")
    page.uncheck("#compare")
    page.fill("#max_tokens", "12")
    page.click("#run")
    page.locator("#status", has_text="done").wait_for()
    assert page.text_content("#text")
    page.fill("#prompt", "too long " * 2000)
    page.click("#run")
    page.locator("#status", has_text="failed").wait_for()
    assert re.search("status 400", page.inner_text("#error"))


def test_a_server_with_an_api_key(browser: Any, tmp_path: Path) -> None:
    key = "clé 🔑"  # fetch needs these characters encoded
    with serving(tmp_path / "log", "--api-key", key, *README_FLAGS) as up, opened(browser, up.url) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.locator("#key-field").wait_for()
        assert not page.is_visible("#error")
        assert page.evaluate("() => document.activeElement.id") == "key"
        page.keyboard.type("wrong")
        page.keyboard.press("Tab")
        page.locator("#error", has_text="does not accept this API key").wait_for()
        page.fill("#key", f" {key}")
        page.fill("#max_tokens", "12")
        page.click("#run")
        page.locator("#status", has_text="done").wait_for()
        page.locator("#served", has_text="demo").wait_for()
        assert page.inner_text("#verdict").startswith("Identical text")
        assert not page.is_visible("#error")
        # The key is in no URL and is not stored.
        called = {url for url in asked if "/playground/" not in url}
        assert called == {f"{up.url}/{path}" for path in ("v1/server_info", "tokenizer_info", "v1/completions")}
        assert page.url.startswith(f"{up.url}/#prompt=") and "key" not in page.url
        assert page.evaluate("() => [localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
