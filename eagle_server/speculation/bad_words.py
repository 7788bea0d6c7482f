"""Bad words of several tokens, on the host: which of them could be completed after a text.

Drafted tokens are on the device and the text so far is known to the host. So a word's tokens before the last one are
split in two. The host compares those in the text so far; the device compares those on a row's drafted path.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ANY = -1  # in a word: matches every token
PATH_START = -2  # before the first drafted token of a path

Array = NDArray[np.int64]


class WordBeginnings:
    """The beginnings of one request's words, sorted by their last token. Built once per request.

    A beginning is cut from a word: the word's last token and 0 to steps tokens before it are missing. There are at
    most (steps + 1) * words of them.
    """

    def __init__(self, tokens: Array, lengths: Array, steps: int) -> None:
        """tokens int64: the words one after the other; lengths int64 [words], 2 or more."""
        self._tokens, self._steps = tokens, steps
        remaining = (lengths - 1)[:, None] - np.arange(steps + 1)
        words, drafted = np.nonzero(remaining > 0)
        last = (lengths.cumsum() - 1)[words]
        newest = tokens[last - drafted - 1]
        order = np.argsort(newest, kind="stable")
        self._newest = newest[order]
        self._last, self._drafted = last[order], drafted[order]  # the word's last place in `tokens`; missing tokens - 1
        self._lengths = remaining[words, drafted][order]

    def after(self, tokens: Sequence[int]) -> Array:
        """The tokens to draft after `tokens` so that a word lacks only its last token: int64 [matches, 2 + steps].

        Each row has the word's last token, then the tokens before it that are not in the text, newest first, then
        PATH_START, then ANY. `tokens` has at least one token.
        """
        matches = self._last_of(tokens)
        last, drafted, back = self._last[matches, None], self._drafted[matches, None], np.arange(self._steps + 1)
        missing = self._tokens[np.maximum(last - 1 - back, 0)]
        missing = np.where(back < drafted, missing, np.where(back == drafted, PATH_START, ANY))
        return np.concatenate([self._tokens[last], missing], axis=1)

    def _last_of(self, tokens: Sequence[int]) -> Array:
        """The numbers of the beginnings that `tokens` ends with.

        Each step compares four times as many tokens, so the time is linear in the words' length.
        """
        first, end = np.searchsorted(self._newest, (tokens[-1], tokens[-1] + 1))
        alive, compared, matches = np.arange(first, end), 1, []
        while alive.size:
            lengths = self._lengths[alive]
            matches.append(alive[lengths <= compared])
            is_open = (lengths > compared) & (lengths <= len(tokens))
            alive, lengths = alive[is_open], lengths[is_open]
            if not alive.size:
                break
            longest = min(4 * compared, int(lengths.max()))
            in_text = np.array(tokens[len(tokens) - longest : len(tokens) - compared])[::-1]
            back = np.arange(compared, longest)
            newest = self._last[alive] - 1 - self._drafted[alive]
            in_words = self._tokens[np.maximum(newest[:, None] - back, 0)]
            alive = alive[((in_words == in_text) | (back >= lengths[:, None])).all(axis=1)]
            compared = longest
        return np.concatenate(matches) if matches else alive


def short_words(tokens: Array, lengths: Array, longest: int) -> tuple[Array, int]:
    """The words of 2 to `longest` tokens, sorted by their last token but one; and how many words share it, at most.

    int64 [words, longest]: each row has a word's last token, then the tokens before it, newest first, then ANY.
    """
    is_short = lengths <= longest
    last, count, back = (lengths.cumsum() - 1)[is_short, None], lengths[is_short, None] - 1, np.arange(longest - 1)
    before = np.where(back < count, tokens[np.maximum(last - 1 - back, 0)], ANY)
    words = np.concatenate([tokens[last], before], axis=1)[np.argsort(before[:, 0], kind="stable")]
    place_in_group = np.arange(len(words)) - np.searchsorted(words[:, 1], words[:, 1])
    return words, int(place_in_group.max(initial=-1)) + 1
