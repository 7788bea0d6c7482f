"""ReDrafter tests beyond `test_every_drafter`: the head's input, its options, and refused settings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_server.attention.dense import DenseCausal
from eagle_server.config import parse_args
from eagle_server.engine.assembly.from_config import build_engine
from eagle_server.speculation.tree import Tree
from eagle_server.worker.batch.batch import DecodeBatch
from eagle_server.worker.drafters.redrafter import Beams
from tests.lossless.pairs import Pair, Pairs, redrafter
from tests.lossless.scenes import REQUESTS, check
from tests.support.engines import FIXED_TREES, request, run, speculative


@pytest.fixture
def pair(pairs: Pairs) -> Pair:
    return pairs.pair_of(redrafter)


def test_the_context_is_the_feature_before_each_verified_token(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is the target's hidden state at the position before verified_id, whatever was accepted."""
    seen: list[tuple[int, int, Tensor]] = []
    propose = Beams.propose

    def recorded(self: Beams, draft: Tensor, batch: DecodeBatch) -> Tree:
        seen.append((batch.seq_lens_host[0], int(batch.verified_id[0]), draft[0].clone()))
        return propose(self, draft, batch)

    monkeypatch.setattr(Beams, "propose", recorded)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    target = pair.target
    engine = speculative(target, pair.head, 3, 4, chunked_prefill_size=5)
    written = run(engine, [request(0, prompt, max_tokens=40, ignore_eos=True)])["0"].tokens
    text = torch.tensor(prompt + written)
    hidden = target(text, torch.arange(len(text)), DenseCausal(1)).hidden
    assert len({length for length, _, _ in seen}) == len(seen) > 5
    assert any(b - a > 1 for (a, *_), (b, *_) in zip(seen, seen[1:], strict=False))
    for length, verified_id, context in seen:
        assert verified_id == int(text[length])
        torch.testing.assert_close(context, hidden[length - 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("algorithm", [["--speculative-algorithm", "REDRAFTER"], []], ids=["named", "detected"])
def test_a_head_is_served_by_its_options(pair: Pair, texts: dict[str, list[int]], algorithm: list[str]) -> None:
    paths = ["--model-path", str(pair.directory), "--speculative-draft-model-path", str(pair.draft)]
    trees = ["--speculative-num-steps", "3", "--topk", "4", "--max-total-tokens", "2048", *FIXED_TREES]
    threads = torch.get_num_threads()
    engine = build_engine(parse_args([*paths, *algorithm, *trees], {}), progress=False)
    torch.set_num_threads(threads)
    resolved = engine.ready().resolved["speculative"]
    assert (resolved["algorithm"], resolved["num_draft_tokens"]) == ("REDRAFTER", 13)
    check(pair.target, run(engine, REQUESTS), texts, [engine])


def test_more_nodes_than_the_beams_hold_are_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="--speculative-num-draft-tokens 14: .* at most 13"):
        speculative(pair.target, pair.head, 3, 4, nodes=14)
