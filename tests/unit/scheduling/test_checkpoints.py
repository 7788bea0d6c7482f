"""Where the states of prompts and outputs are saved."""

from __future__ import annotations

import pytest

from eagle_server.scheduling.checkpoints import prompt_checkpoints


@pytest.mark.parametrize(
    ("prompt", "cached", "page", "expected"),
    [
        ((0, 10), 0, 1, []),  # too short to be worth the memory
        ((0, 50), 0, 1, [48]),  # a whole block before the end
        ((0, 49), 0, 1, [48]),
        ((0, 48), 0, 1, [32]),  # the last token is always computed
        ((0, 250), 0, 1, [100, 200, 240]),  # on the interval
        ((0, 250), 150, 1, [100, 150, 200, 240]),  # where it departs from what is cached
        ((0, 250), 105, 1, [105, 200, 240]),  # of two that are near each other one
        ((0, 70), 59, 1, [59]),
        ((200, 310), 200, 1, [304]),  # after a hit
        ((0, 250), 249, 4, [100, 200, 248]),
        ((0, 70), 69, 1, [69]),
    ],
)
def test_checkpoints_of_a_prompt(prompt: tuple[int, int], cached: int, page: int, expected: list[int]) -> None:
    assert prompt_checkpoints(prompt, cached // page * page, 100, page) == expected
