"""Token maps (FR-Spec) for drafts of every format: logits are the chosen rows of those of the whole vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_server.algorithms import ALGORITHMS
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.block import BlockHead
from eagle_server.models.drafts.interface import DraftModel
from eagle_server.models.drafts.medusa import MedusaHeads
from eagle_server.models.drafts.redrafter import RedrafterHead
from eagle_server.models.targets.decoder import TargetModel
from tests.parity.gguf_checkpoints import own_cache
from tests.support.covering import deep_unless
from tests.unit.models.test_drafts_on_a_device import CONTEXT, MAKERS, Files

__all__ = ["own_cache"]
IDS = [7, 3, 40, 11, 5]


def loaded(files: Files, token_map: Path | None) -> DraftModel:
    how = Loading(context=CONTEXT, lookahead=8, progress=False)
    target = files.target
    served = target if isinstance(target, TargetModel) else load_target(target, how, dtype="float32")
    return load_draft(files.draft, served, how, **{**files.options, "token_map": token_map})


def scores(draft: Any) -> Tensor:
    """Logits of three rows, [.., 3, draft vocabulary]."""
    generator = torch.Generator().manual_seed(2)
    width = draft.config.hidden_size
    rows = torch.randn(2, 3, width, generator=generator)
    if isinstance(draft, MedusaHeads):
        return draft(rows[0])  # type: ignore[no-any-return]
    if isinstance(draft, RedrafterHead):
        return draft.logits(rows[0], rows[1])
    return draft.logits(rows[0])  # type: ignore[no-any-return]


def saved(directory: Path, ids: Any) -> Path:
    torch.save(ids, directory / "chosen.pt")
    return directory / "chosen.pt"


CASES = [
    pytest.param(row, name, marks=deep_unless(place == 0 or "edges" in name or name == "Qwen3.5, GGUF"))
    for row in ALGORITHMS
    for place, name in enumerate(MAKERS[row])
]


@pytest.mark.parametrize(("algorithm", "name"), CASES)
@pytest.mark.usefixtures("own_cache")
def test_a_map_chooses_rows_of_the_logits_or_is_refused(algorithm: str, name: str, tmp_path: Path) -> None:
    files = MAKERS[algorithm][name](tmp_path)
    whole, token_map = loaded(files, None), saved(tmp_path, IDS)
    own = getattr(whole, "d2t", None) is not None
    if own or getattr(whole, "centroids", None) is not None:
        reason = f"{whole.draft_vocab_size} tokens of its own" if own else "centroids choose the tokens"
        with pytest.raises(CheckpointError, match=f"--speculative-token-map: this .*{reason}.*; drop it"):
            loaded(files, token_map)
        return
    few = loaded(files, token_map)
    assert (few.draft_vocab_size, whole.draft_vocab_size) == (len(IDS), whole.vocab_size)
    assert few.target_ids(torch.tensor([[2, 0]])).tolist() == [[40, 7]]
    # The target's lm_head in Q8_0 rounds its inputs to 8 bits; the chosen rows are multiplied out.
    tolerances = {"atol": 0.05, "rtol": 0.0} if name == "Qwen3.5, GGUF" else {}
    torch.testing.assert_close(scores(few), scores(whole)[..., IDS], **tolerances)
    if not isinstance(few, BlockHead) or not isinstance(whole, BlockHead):
        return
    assert few.draft_ids(torch.tensor(IDS)).tolist() == list(range(len(IDS)))
    if few.edges is not None and whole.edges is not None:
        y, parents = torch.randn(2, few.config.hidden_size), torch.tensor([[3, 60 % few.vocab_size]] * 2)
        if few.edges.kind == "selector":
            tokens = torch.tensor(IDS).expand(2, 1, -1)
            torch.testing.assert_close(*(head.edge(y, parents, tokens, None)[0] for head in (few, whole)))
        else:
            found, every = (head.edge(y, parents, None, None)[0] for head in (few, whole))
            torch.testing.assert_close(found, every[..., IDS])


def test_ids_that_a_smaller_draft_lacks_are_refused(tmp_path: Path) -> None:
    draft = loaded(MAKERS["STANDALONE"]["usual"](tmp_path), None)
    with pytest.raises(CheckpointError, match=f"ids below {draft.vocab_size}"):
        draft.restrict_vocabulary(torch.tensor([draft.vocab_size]))
