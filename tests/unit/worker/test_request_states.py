"""Checkpoints hold the state of their text at their length, wherever in a chunk or an accepted path that is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from eagle_server.attention.recurrent import PromptRows, TreeRows
from eagle_server.cache.states import StatePool
from eagle_server.models.gated_delta import GatedDeltaNet
from eagle_server.ops.recurrent.nodes import RecurrentLayer
from eagle_server.plan import StateMoves, StateSave
from eagle_server.speculation.tree import Tree
from eagle_server.worker.request_states import RequestStates
from tests.support.hybrids import hybrid_target

LAYERS: list[RecurrentLayer] = [each.spec for each in hybrid_target().modules() if isinstance(each, GatedDeltaNet)]
SHAPE = LAYERS[0].shape
ROWS = 3
FIRST = ROWS + 1  # of the checkpoints
PARENTS = [-1, 0, 0, 1, 1, 3, 2]
PATH = [0, 1, 3, 5]
Text = tuple[Tensor, Tensor]  # inputs of the convolution, gates


def pool_of(checkpoints: int = 4, *, native: bool) -> StatePool:
    pool = StatePool(len(LAYERS), ROWS, len(PARENTS), SHAPE, torch.float32, torch.device("cpu"), checkpoints)
    pool.poison()
    if not native:
        pool.native = None
    elif pool.native is None:
        pytest.skip("there is no compiler")
    return pool


def text(length: int, seed: int) -> Text:
    generator = torch.Generator().manual_seed(seed)
    sizes = (SHAPE.channels, 2 * SHAPE.value_heads)
    x, gates = (torch.randn(length, size, generator=generator) for size in sizes)
    return x, gates


def prefill(pool: StatePool, chunks: Sequence[tuple[int, int, int]], texts: Sequence[Text], saves: object = ()) -> None:
    """Chunks (row, first position, tokens) of these texts, in all layers."""
    forward = PromptRows(pool, chunks, saves)  # type: ignore[arg-type]
    pieces = [[part[start : start + n] for part in its] for (_, start, n), its in zip(chunks, texts, strict=True)]
    for layer in LAYERS:
        forward.run(*(torch.cat(part) for part in zip(*pieces, strict=True)), layer)


def expect(pool: StatePool, row: int, its: Text, length: int, *, native: bool) -> None:
    """The state in this row is that of the text's first tokens: bit for bit where native kernels compute."""
    alone = pool_of(native=native)
    prefill(alone, [(0, 0, length)], [its])
    tolerance = 0.0 if native else 1e-5
    for stored, expected in ((pool.states, alone.states), (pool.rings, alone.rings)):
        torch.testing.assert_close(stored[:, row], expected[:, 0], atol=tolerance, rtol=tolerance)


def accepted(pool: StatePool, states: RequestStates, texts: dict[int, Text], length: int) -> None:
    """Trees after the first `length` tokens, whose PATH holds the texts' next tokens, are verified and accepted."""
    rows = torch.tensor(list(texts))
    tree = Tree.linked(torch.zeros(len(rows), 7, dtype=torch.int64), torch.tensor([PARENTS] * len(rows)), rows * 0, 4)
    nodes = [text(7, 50 + row) for row in texts]
    for parts, its in zip(nodes, texts.values(), strict=True):
        for part, values in zip(parts, its, strict=True):
            part[PATH] = values[length : length + len(PATH)]
    forward = TreeRows(pool, tree, rows)
    for layer in LAYERS:
        forward.run(*(torch.cat(part) for part in zip(*nodes, strict=True)), layer)
    paths = torch.tensor([[*PATH, -1]] * len(rows))
    states.accept(paths, rows, dict.fromkeys(texts, length))


@pytest.mark.parametrize("native", [False, True])
def test_a_prompt_leaves_checkpoints_on_its_way(native: bool) -> None:
    """Two chunks in one forward, with checkpoints in the middle and at the end; then a text goes on from one."""
    pool, first, second = pool_of(native=native), text(80, 1), text(25, 2)
    saves = [StateSave(0, 73, FIRST), StateSave(0, 7, FIRST + 2), StateSave(2, 25, FIRST + 1)]
    prefill(pool, [(0, 0, 80), (2, 0, 25)], [first, second], saves)
    for row, its, length in ((0, first, 80), (2, second, 25), (FIRST, first, 73), (FIRST + 2, first, 7)):
        expect(pool, row, its, length, native=native)
    expect(pool, FIRST + 1, second, 25, native=native)
    RequestStates(pool).settle(StateMoves(restores=((FIRST + 2, 1),)))
    prefill(pool, [(1, 7, 40)], [first])
    expect(pool, 1, first, 47, native=native)


@pytest.mark.parametrize("native", [False, True])
def test_states_are_saved_at_any_length_that_an_accepted_path_passes(native: bool) -> None:
    """Request 0 is saved twice and goes on, request 1 has left within the path, request 2 goes on."""
    pool, texts = pool_of(native=native), {row: text(40, row) for row in (0, 2, 1)}
    states = RequestStates(pool)
    prefill(pool, [(row, 0, 20) for row in texts], list(texts.values()))
    accepted(pool, states, texts, 20)
    assert not states.settled
    saves = (StateSave(0, 23, FIRST), StateSave(1, 20, FIRST + 1), StateSave(0, 21, FIRST + 2))
    states.settle(StateMoves(saves, restores=((FIRST + 2, 1),)))
    assert states.settled
    for row, its, length in (
        (FIRST, 0, 23),
        (FIRST + 1, 1, 20),
        (FIRST + 2, 0, 21),
        (0, 0, 24),
        (2, 2, 24),
        (1, 0, 21),
    ):
        expect(pool, row, texts[its], length, native=native)
    accepted(pool, states, texts | {1: texts[0]}, 24)  # what request 1 stores now means nothing
    states.settle(StateMoves((StateSave(2, 28, FIRST), StateSave(0, 26, FIRST))))
    expect(pool, FIRST, texts[0], 26, native=native)  # the later one replaces the earlier one
    expect(pool, 2, texts[2], 28, native=native)


def test_a_request_whose_state_has_settled_is_saved_as_it_is() -> None:
    pool, its = pool_of(native=False), text(12, 3)
    prefill(pool, [(1, 0, 12)], [its])
    RequestStates(pool).settle(StateMoves((StateSave(1, 12, FIRST),)))
    expect(pool, FIRST, its, 12, native=False)
