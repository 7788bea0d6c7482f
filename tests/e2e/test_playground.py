"""The playground in a real browser: an installed Chromium, controlled by playwright (`pip install -e '.[browser]'`)."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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
def opened(browser: Any, url: str) -> Iterator[Any]:
    """The page. It must load nothing from other hosts and report no error."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
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
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(url) else complaints.append(request.url))
    page.goto(url)
    yield page
    page.close()
    assert complaints == []


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    with opened(browser, served.url) as page:
        page.locator("#served", has_text="demo").wait_for()
        yield page


def test_a_run_shows_its_trees_and_the_same_text_from_plain_decoding(page: Any) -> None:
    page.fill("#max_tokens", "40")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.locator("#status", has_text="done").wait_for()
    assert page.inner_text("#verdict").startswith("identical text")
    assert page.text_content("#text") == page.text_content("#plain") != ""
    cycles = int(page.inner_text("#count"))
    counts = [int(text or 0) for text in page.locator("#histogram b").all_inner_texts()]
    assert sum(counts) == cycles
    assert 1 + sum(length * count for length, count in enumerate(counts)) / cycles == pytest.approx(
        float(page.inner_text("#length")), abs=0.01
    )
    assert page.evaluate("() => document.documentElement.scrollWidth") == 390  # the page fits a phone's screen

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
    drafted = int(re.match(r"this one (\d+), accepted (\d+)$", page.inner_text("#budget-now"))[1])
    assert drafted == 12  # the tree of README_FLAGS has 13 nodes, its root included
    assert page.locator("#tree .node").count() == 13 + 1  # the tree, and the bonus
    assert page.get_attribute("#budget path.drafted", "d").count("M") == cycles  # a bar per cycle
    later = page.locator("#text [data-cycle]:not([data-cycle='0'])").filter(has_text=re.compile(r"\w")).first
    later.click()
    assert page.inner_text("#cycle-name") == f"cycle {int(later.get_attribute('data-cycle')) + 1} of {cycles}"


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
        assert page.inner_text("#verdict").startswith("identical text")
        assert not page.is_visible("#error")
        # The key is in no URL and is not stored.
        called = {url for url in asked if "/playground/" not in url}
        assert called == {f"{up.url}/{path}" for path in ("v1/server_info", "tokenizer_info", "v1/completions")}
        assert page.url == f"{up.url}/"
        assert page.evaluate("() => [localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
