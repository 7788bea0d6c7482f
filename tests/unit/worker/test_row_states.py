"""A head with several MTP layers reads what each layer gave at the row before, however the text came to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from eagle_server.worker.batch.batch import prompt_batch
from eagle_server.worker.drafters.row_states import RowStates

LAYERS, HIDDEN, WIDTH, REQUESTS = 3, 4, 4, 5
CPU = torch.device("cpu")


class Text:
    """z of every row and layer of a request's text, and what the layers were told of the rows before."""

    def __init__(self, seed: int) -> None:
        self.z = torch.randn(40, LAYERS - 1, HIDDEN, generator=torch.Generator().manual_seed(seed))
        self.before = torch.cat([torch.zeros(1, LAYERS - 1, HIDDEN), self.z[:-1]])


@pytest.fixture
def states() -> RowStates:
    config = SimpleNamespace(hidden_size=HIDDEN, dtype=torch.float32)
    return RowStates(cast(Any, SimpleNamespace(config=config, num_layers=LAYERS)), REQUESTS, WIDTH, CPU)


def read(states: RowStates, texts: dict[int, Text], pieces: list[tuple[int, int, int]]) -> list[Tensor]:
    """What the layers read in pieces of prompt (request, first position, rows): [rows, layers - 1, H] each."""
    table = torch.zeros(REQUESTS, 64, dtype=torch.int32)
    batch = prompt_batch([(request, start, [1] * count) for request, start, count in pieces], table)
    before = states.reading(batch)
    z = torch.cat([texts[request].z[start : start + count] for request, start, count in pieces])
    found = torch.stack([before(layer, z[:, layer]) for layer in range(LAYERS - 1)], dim=1)
    return list(found.split([count for _, _, count in pieces]))


def extend(states: RowStates, texts: dict[int, Text], firsts: dict[int, int], width: int) -> list[Tensor]:
    before = states.extending(torch.tensor([*firsts]), torch.tensor([*firsts.values()]), width)
    z = torch.cat([texts[request].z[first : first + width] for request, first in firsts.items()])
    found = torch.stack([before(layer, z[:, layer]) for layer in range(LAYERS - 1)], dim=1)
    return list(found.split(width))


def test_chunks_and_accepted_tokens_continue_a_text(states: RowStates) -> None:
    """Also a draft-extend that runs twice, as one that ran ahead may not be used."""
    texts = {request: Text(request) for request in (1, 3)}
    for pieces in ([(1, 0, 5), (3, 0, 1)], [(3, 1, 7)], [(1, 5, 3), (3, 8, 1)]):
        for (request, start, count), found in zip(pieces, read(states, texts, pieces), strict=True):
            torch.testing.assert_close(found, texts[request].before[start : start + count], atol=0, rtol=0)
    for firsts, width in (({3: 9, 1: 8}, 1), ({3: 9, 1: 8}, 1), ({1: 9, 3: 10}, 4), ({1: 12, 3: 11}, 4), ({3: 15}, 2)):
        for (request, first), found in zip(firsts.items(), extend(states, texts, firsts, width), strict=True):
            torch.testing.assert_close(found, texts[request].before[first : first + width], atol=0, rtol=0)


@pytest.mark.parametrize("first", [6, 30])
def test_nothing_is_known_after_a_prefix_hit_or_of_the_last_request_of_a_row(states: RowStates, first: int) -> None:
    texts = {1: Text(1)}
    read(states, texts, [(1, 0, 6)])
    states.forget(1)
    (found,) = read(states, texts, [(1, first, 3)])
    assert not found[0].any()
    torch.testing.assert_close(found[1:], texts[1].before[first + 1 : first + 3], atol=0, rtol=0)
