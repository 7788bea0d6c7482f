"""Which of best_of's outputs /v1/completions answers, over an engine whose texts and scores differ by choice."""

from __future__ import annotations

import httpx
import pytest

from eagle_server.request import Request, TokenLogprob
from tests.api import fake_engine
from tests.api.fake_engine import EOS, ID, FakeEngine

# Each choice repeats a letter. `b` is more likely than `a` as a whole, but less likely per token.
REPLIES = ["aaaa", "b", "c", "dd", "ee", "ff"]
SCORES = {"a": -1.0, "b": -1.5, "c": -0.5, "d": -3.0, "e": -0.1, "f": -2.0}


class LetterEngine(FakeEngine):
    def add(self, request: Request) -> None:
        super().add(request)
        self.sequences[request.request_id].reply = [*REPLIES[request.choice].encode(), ID[EOS]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    def scored(token: int, alternatives: int) -> TokenLogprob:
        return TokenLogprob(token, SCORES.get(chr(token), -1.0), [])

    monkeypatch.setattr(fake_engine, "logprob", scored)
    return LetterEngine()


@pytest.mark.parametrize(
    ("n", "texts"), [(1, ["c", "ee"]), (2, ["c", "aaaa", "ee", "ff"]), (3, ["aaaa", "b", "c", "dd", "ee", "ff"])]
)
async def test_the_most_likely_per_token_come_first_and_are_numbered_anew(
    http: httpx.AsyncClient, n: int, texts: list[str]
) -> None:
    body = {"prompt": ["x", "y"], "n": n, "best_of": 3, "max_tokens": 9, "return_token_ids": True}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [*range(2 * n)]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * (2 * n), "the ranking's are not shown"
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [[ord("x")]] * n + [[ord("y")]] * n, "each has the prompt that it continues"
    assert answer["usage"]["completion_tokens"] == sum(len(text) + 1 for text in REPLIES), (
        "all that was generated counts"
    )
