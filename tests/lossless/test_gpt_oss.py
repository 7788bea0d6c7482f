"""gpt-oss: sinks, windows and clamped experts under trees. Texts are transformers', and speculation changes none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_fields

from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.standalone import DraftLM
from tests.lossless.scenes import as_on_a_gpu
from tests.parity.checkpoints import CASES, VOCAB, write
from tests.parity.test_mxfp4 import written as mxfp4
from tests.parity.test_transformers_target import generated
from tests.support.engines import (
    CONTEXT,
    admit_without_reserve,
    engine_config,
    plain,
    random_head,
    request,
    run,
    speculative,
    tokens_of,
)
from tests.support.ranks import SplitEngines

PROMPTS = [
    each[: 10 * i + 3]
    for i, each in enumerate(torch.randint(1, VOCAB, (4, 40), generator=torch.Generator().manual_seed(3)).tolist())
]
GREEDY = [request(i, prompt, max_tokens=16, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
DRAWN = [
    request(i, prompt, max_tokens=16, ignore_eos=True, temperature=0.8, seed=i) for i, prompt in enumerate(PROMPTS)
]


DRAWN_TOO = [with_fields(each, request_id=f"drawn {each.request_id}") for each in DRAWN]


@dataclass(frozen=True)
class Served:
    """A checkpoint of transformers, the target of it, transformers' greedy texts, and what plain decoding draws."""

    directory: Path
    target: Any
    greedy: dict[str, list[int]]
    drawn: dict[str, list[int]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = tmp_path_factory.mktemp("gpt-oss")
    theirs = write(CASES["gpt-oss"], directory, max_position_embeddings=CONTEXT)
    ours: Any = load_target(directory, Loading(context=CONTEXT, lookahead=16, progress=False), dtype="float32")
    return Served(directory, ours, generated(theirs, PROMPTS, 16), tokens_of(run(plain(ours), DRAWN)))


CASCADE = {"verify_attention": "cascade", "draft_attention": "cascade"}
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "n-grams in chunks": ("", {"topk": 1, "ngram_steps": 4, "nodes": 8, "chunked_prefill_size": 7}),
    "a model that is preempted": ("itself", {"max_total_tokens": 112, "page_size": 4}),
    "a head in chunks": ("EAGLE3", {"chunked_prefill_size": 16}),
    "a head on FlashInfer, masks": ("EAGLE3", as_on_a_gpu((1, 2, 4))),
    "a model on FlashInfer, cascades": ("itself", {**as_on_a_gpu((1, 2, 4)), **CASCADE}),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_text_with_any_drafter_is_what_transformers_generates(served: Served, name: str) -> None:
    """And the drawn text is that of plain decoding."""
    ours, (kind, settings) = served.target, DRAFTS[name]
    head = {"": lambda: None, "itself": lambda: DraftLM(ours), "EAGLE3": lambda: random_head(ours, "EAGLE3")}[kind]()
    engine = speculative(ours, head, 3 if kind else 0, **settings)
    admit_without_reserve(engine.scheduler)
    assert tokens_of(run(engine, GREEDY[:2], joining={3: GREEDY[2:]})) == served.greedy
    assert tokens_of(run(engine, DRAWN)) == served.drawn
    stats = engine.stats()
    assert stats.drafted_tokens > stats.accepted_tokens > (0 if kind else -1)
    assert (stats.preemptions > 0) == ("max_total_tokens" in settings)


def test_four_bits_in_bfloat16_give_the_same_text_with_any_draft(tmp_path: Path) -> None:
    """Every row is computed in the same order in every batch and tree, so there are no near-ties."""
    mxfp4(tmp_path, max_position_embeddings=CONTEXT)
    ours: Any = load_target(tmp_path, Loading(context=CONTEXT, lookahead=16, progress=False), dtype="bfloat16")
    expected = tokens_of(run(plain(ours), GREEDY + DRAWN_TOO))
    for head in (DraftLM(ours), random_head(ours, "EAGLE3").bfloat16()):
        engine = speculative(ours, head, chunked_prefill_size=7)  # type: ignore[arg-type]
        assert tokens_of(run(engine, GREEDY, joining={3: DRAWN_TOO})) == expected
        assert engine.stats().drafted_tokens > 0


def test_two_ranks_give_the_text_of_one(served: Served) -> None:
    with SplitEngines(served.directory, 2) as split:
        two = split.engine(lambda target: None, engine_config(ngram_steps=4, nodes=6))
        assert tokens_of(run(two, GREEDY)) == served.greedy
