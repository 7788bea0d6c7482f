"""Both numberings of aux layers in published files become boundaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_server.models.checkpoints.drafts.aux_layers import aux_boundaries
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from tests.unit.models import draft_checkpoints as dc
from tests.unit.models.draft_checkpoints import LAYERS

BOUNDARIES = (2, LAYERS // 2, LAYERS - 3)
KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, BOUNDARIES),
        ({"eagle_config": {KEY: []}}, BOUNDARIES),
        ({KEY: [2, 4, 5]}, BOUNDARIES),
        ({KEY: [1, 3, 4]}, (1, 3, 4)),  # a top-level key holds boundaries
        ({"eagle_config": {KEY: [1, 3, 4]}}, BOUNDARIES),  # output ids of the default
        ({"eagle_config": {KEY: [2, 4, 5]}}, BOUNDARIES),  # boundaries of the default
        ({"eagle_config": {KEY: [3, 5, 8]}}, (3, 5, 8)),  # 8 = L can only be a boundary
        ({"eagle_config": {KEY: [0, 3, 6]}}, (1, 4, 7)),
        ({"aux_boundaries": [1, 2, 3], KEY: [2, 4, 5]}, (1, 2, 3)),
    ],
)
def test_aux_layer_numberings_become_boundaries(config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert aux_boundaries(config, LAYERS, "config.json") == expected


@pytest.mark.parametrize("ids", [[2, 2, 3], [5, 4, 2], [-1, 2, 3], [2, 4, 9], [1.5, 2, 3], "2,4,5"])
def test_impossible_aux_layers_are_refused(ids: object) -> None:
    with pytest.raises(CheckpointError, match=KEY):
        aux_boundaries({KEY: ids}, LAYERS, "config.json")


@pytest.mark.parametrize("layers", [4, 6])
def test_small_targets_need_explicit_aux_layers(layers: int) -> None:
    with pytest.raises(CheckpointError, match="must be given"):
        aux_boundaries({}, layers, "config.json")


@pytest.mark.parametrize(
    "config", [{KEY: [3, 4, 8]}, {"eagle_config": {KEY: [3, 4, 8]}}, {"eagle_config": {KEY: [2, 3, 7]}}], ids=str
)
def test_files_in_either_numbering_give_the_same_boundaries(tmp_path: Path, config: dict[str, Any]) -> None:
    """Top-level boundaries, nested boundaries (8 = L) and nested outputs."""
    directory = dc.write(tmp_path, dc.eagle3_tensors(), {**dc.CONFIG, "draft_vocab_size": dc.VD, **config})
    assert load_draft(directory, dc.target(), Loading(context=64, progress=False)).aux_boundaries == (3, 4, 8)


def test_override_of_aux_boundaries_is_final(tmp_path: Path) -> None:
    directory = dc.write(tmp_path, dc.eagle3_tensors(), {**dc.CONFIG, "draft_vocab_size": dc.VD, KEY: [2, 4, 5]})
    loaded = load_draft(
        directory, dc.target(), Loading(context=64, progress=False), overrides={"aux_boundaries": [1, 2, 3]}
    )
    assert loaded.aux_boundaries == (1, 2, 3)
