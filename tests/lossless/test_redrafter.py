"""ReDrafter changes no text: greedy and seeded, in batches, after preemption, and as on a GPU with replayed graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.config import parse_args
from eagle_server.engine.build import build_engine
from eagle_server.engine.engine import Engine
from eagle_server.models.load_draft import load_draft
from eagle_server.models.loader import load_target, save_checkpoint
from eagle_server.models.redrafter import RedrafterHead
from eagle_server.models.target import TargetModel
from eagle_server.speculation.tree import TreeNodes
from eagle_server.training.tiny import tiny_pair
from eagle_server.worker.batch import DecodeBatch
from eagle_server.worker.drafters.redrafter import RedrafterDrafter
from tests.lossless.test_equality import REQUESTS, SCENES
from tests.lossless.test_flashinfer import as_on_a_gpu
from tests.support.engines import plain, request, run, speculative, tokens_of
from tests.support.redrafter import trained_redrafter
from tests.support.scoring import NEAR_TIE, in_float64, slack


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in target/, and in redrafter/ a head that was trained for some seconds."""
    path = tmp_path_factory.mktemp("pair")
    files = tiny_pair(path, kind="eagle", steps=1)
    new = trained_redrafter(load_target(files.target, dtype="float32", progress=False, pack=False))
    save_checkpoint(new.head, path / "redrafter", new.config_json, torch.float32)
    return path


@pytest.fixture(scope="module")
def target(directory: Path) -> TargetModel:
    return load_target(directory / "target", dtype="float32", progress=False)


@pytest.fixture(scope="module")
def head(directory: Path, target: TargetModel) -> RedrafterHead:
    loaded = load_draft(directory / "redrafter", target, context=256, progress=False)
    assert loaded.kind == "REDRAFTER"
    assert isinstance(loaded.head, RedrafterHead)
    return loaded.head


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> dict[str, list[int]]:
    """The plain outputs; none of their draws is a near-tie."""
    outcome = run(plain(target), REQUESTS)
    exact = in_float64(target)
    assert min(slack(exact, each, outcome[each.request_id].tokens) for each in REQUESTS) > NEAR_TIE
    return tokens_of(outcome)


def check(engines: Sequence[Engine], outcome: Mapping[str, Any], texts: Mapping[str, list[int]]) -> None:
    for name, finished in outcome.items():
        assert finished.tokens == texts[name], f"request {name}"
    totals = [engine.stats() for engine in engines]
    assert 0 < sum(t.accepted_tokens for t in totals) < sum(t.drafted_tokens for t in totals)


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("steps", "beams", "size"), [(1, 4, 5), (3, 4, 13), (4, 1, 5), (5, 3, 6)])
def test_output_with_redrafter_equals_plain_output(  # noqa: PLR0917
    target: TargetModel,
    head: RedrafterHead,
    texts: dict[str, list[int]],
    steps: int,
    beams: int,
    size: int,
    page: int,
    scene: str,
) -> None:
    engines: list[Engine] = []

    def build(**settings: Any) -> Engine:
        numbers = {"draft_token_num": size, "page_size": page, **settings}
        engines.append(speculative(target, head, steps, beams, **numbers))
        return engines[-1]

    check(engines, SCENES[scene](build), texts)


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize(
    ("steps", "beams", "modes"),
    [(3, 4, {"verify_attention": "mask"}), (3, 4, {"verify_attention": "cascade"}), (4, 1, {})],
    ids=str,
)
def test_captured_cycles_on_flashinfer_give_the_plain_text(  # noqa: PLR0917
    target: TargetModel,
    head: RedrafterHead,
    texts: dict[str, list[int]],
    steps: int,
    beams: int,
    modes: dict[str, Any],
    scene: str,
) -> None:
    engines: list[Engine] = []

    def build(**settings: Any) -> Engine:
        engines.append(speculative(target, head, steps, beams, **as_on_a_gpu(), **modes, **settings))
        return engines[-1]

    check(engines, SCENES[scene](build), texts)
    keys = engines[0].worker.verifier.graphs.keys
    assert {key for key in keys if isinstance(key, tuple) and key[0] == "redrafter"} == {
        ("redrafter", size) for size in (1, 2, 4, 8)
    }


def test_the_context_is_the_feature_before_each_verified_token(
    target: TargetModel, head: RedrafterHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h is the target's hidden state of the position before verified_id, however many tokens were accepted."""
    seen: list[tuple[int, int, Tensor]] = []
    propose = RedrafterDrafter.propose

    def noting(self: RedrafterDrafter, draft: Tensor, batch: DecodeBatch) -> TreeNodes:
        seen.append((batch.seq_lens_host[0], int(batch.verified_id[0]), draft[0].clone()))
        return propose(self, draft, batch)

    monkeypatch.setattr(RedrafterDrafter, "propose", noting)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    engine = speculative(target, head, 3, 4, chunk_tokens=5)
    written = run(engine, [request(0, prompt, max_tokens=40, ignore_eos=True)])["0"].tokens
    text = torch.tensor(prompt + written)
    target.aux_boundaries = ()
    hidden = target(text, torch.arange(len(text)), DenseCausal(1)).hidden
    assert len({length for length, _, _ in seen}) == len(seen) > 5
    assert any(b - a > 1 for (a, *_), (b, *_) in zip(seen, seen[1:], strict=False))
    for length, verified_id, context in seen:
        assert verified_id == int(text[length])
        torch.testing.assert_close(context, hidden[length - 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("algorithm", [["--speculative-algorithm", "REDRAFTER"], []], ids=["named", "detected"])
def test_a_head_is_served_by_its_options(directory: Path, texts: dict[str, list[int]], algorithm: list[str]) -> None:
    paths = ["--model-path", str(directory / "target"), "--speculative-draft-model-path", str(directory / "redrafter")]
    trees = ["--speculative-num-steps", "3", "--topk", "4", "--max-total-tokens", "2048"]
    threads = torch.get_num_threads()
    engine = build_engine(parse_args([*paths, *algorithm, *trees], {}), progress=False)
    torch.set_num_threads(threads)
    resolved = engine.ready().resolved["speculative"]
    assert (resolved["algorithm"], resolved["num_draft_tokens"]) == ("REDRAFTER", 13)
    check([engine], run(engine, REQUESTS), texts)


def test_more_nodes_than_the_beams_hold_are_refused(target: TargetModel, head: RedrafterHead) -> None:
    with pytest.raises(ValueError, match="--speculative-num-draft-tokens 14: .* at most 13"):
        speculative(target, head, 3, 4, draft_token_num=14)
