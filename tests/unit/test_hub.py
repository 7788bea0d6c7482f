"""Models of the Hugging Face Hub where there is no network: one question, no retries, and an error in our words."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from eagle_server import LLM
from eagle_server.hub import HubError, NotCached, hub_file, hub_snapshot, why_offline
from eagle_server.text.model_files import find_file

ADDRESS = "no/such-model"
REPOSITORY = Path(__file__).parents[2]


class Hub:
    """Stands in for the hub library's functions. `reached`: what asking it gives; `answer`: what a download gives."""

    def __init__(self) -> None:
        self.questions = 0
        self.local_only: list[bool] = []
        self.reached: Exception | None = None
        self.answer: Exception | Path = Path("/cached")

    def head(self, url: str, *, timeout: float) -> httpx.Response:
        assert url == constants.ENDPOINT and timeout <= 5
        self.questions += 1
        if self.reached is not None:
            raise self.reached
        return httpx.Response(503)

    def download(self, repository: str, *_: Any, local_files_only: bool = False, **__: Any) -> str:
        self.local_only.append(local_files_only)
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    stand_in = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: stand_in)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", stand_in.download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in.download)
    why_offline.cache_clear()
    yield stand_in
    why_offline.cache_clear()


def test_without_a_network_the_hub_is_asked_once_and_only_the_cache_is_read(hub: Hub) -> None:
    hub.reached = httpx.ConnectError("[Errno -2] Name or service not known\nand more")
    assert hub_file(ADDRESS, "a.json") == Path("/cached")
    assert hub_snapshot(ADDRESS, allow=["*"], ignore=[]) == Path("/cached")
    hub.answer = LocalEntryNotFoundError("cannot find the requested files")
    with pytest.raises(NotCached) as failure:
        hub_file(ADDRESS, "tokenizer.json")
    message = str(failure.value)
    assert message.startswith(f"{ADDRESS}: no such directory, and tokenizer.json is not in the cache")
    assert constants.HF_HUB_CACHE in message
    assert f"{constants.ENDPOINT} cannot be reached ([Errno -2] Name or service not known);" in message
    assert f"`hf download {ADDRESS}`" in message
    assert (hub.questions, hub.local_only) == (1, [True] * 3)


def test_with_a_network_files_are_downloaded(hub: Hub) -> None:
    assert hub_file(ADDRESS, "a.json") == Path("/cached")
    assert (hub.questions, hub.local_only) == (1, [False])
    hub.answer = EntryNotFoundError("404")
    assert hub_file(ADDRESS, "b.json") is None


def test_offline_mode_asks_nobody(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.answer = LocalEntryNotFoundError("no")
    with pytest.raises(NotCached, match="and HF_HUB_OFFLINE is set; `hf download"):
        hub_file(ADDRESS, "tokenizer.json")
    assert (hub.questions, hub.local_only) == (0, [True])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (RepositoryNotFoundError, "no such directory, and no such model on https://huggingface.co; a private one"),
        (GatedRepoError, "gives this model only to accounts that accepted its terms; set HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: Hub, kind: Any, message: str) -> None:
    request = httpx.Request("GET", "https://huggingface.co")
    hub.answer = kind("401 Client Error.\n\nRepository Not Found", response=httpx.Response(401, request=request))
    with pytest.raises(HubError, match=message) as failure:
        hub_snapshot(ADDRESS, allow=["*"], ignore=[])
    assert "\n" not in str(failure.value)


def test_an_optional_file_is_done_without(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.reached, hub.answer = httpx.ConnectError("away"), LocalEntryNotFoundError("no")
    with caplog.at_level(logging.WARNING):
        assert find_file(ADDRESS, "chat_template.jinja", required=False) is None
    assert "going on without a file" in caplog.text


def test_python_says_at_once_what_is_missing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.reached, hub.answer = httpx.ConnectError("away"), LocalEntryNotFoundError("no")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("nothing is tried again"))
    with pytest.raises(OSError, match=f"^{ADDRESS}: no such directory, and tokenizer.json is not in the cache"):
        LLM(ADDRESS)
    assert hub.questions == 1


def test_a_start_offline_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eagle_server", "serve", ADDRESS, "--uds", str(tmp_path / "socket")]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    _, *lines = done.stderr.splitlines()  # the first one says what was asked for
    assert len(lines) == 1
    assert lines[0].startswith(f"eagle_server: error: {ADDRESS}: no such directory, and tokenizer.json is not")
