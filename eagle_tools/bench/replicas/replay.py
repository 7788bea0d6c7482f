"""A short real load on a running server, to compare with a simulation of the same turns on one replica."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from eagle_tools.bench.load import TimedAnswer, Workload, ask
from eagle_tools.bench.replicas.conversations import Dialogue, Turn
from eagle_tools.bench.replicas.simulation import TurnTimes
from eagle_tools.bench.servers import BenchError, ServerAddress


@dataclass(frozen=True)
class Replayed:
    """A turn that the server answered: when it was sent, seconds after the start, and its answer."""

    sent: float
    seconds: float
    answer: TimedAnswer


def replay(
    server: ServerAddress,
    conversations: Sequence[Dialogue],
    texts: Sequence[str],
    advance: Callable[[], None] = lambda: None,
) -> tuple[TurnTimes, list[Dialogue]]:
    """Hold the conversations with a server. Users say pieces of `texts`.

    Returns what was measured, and the conversations with the lengths that the server counted.

    Raises:
        BenchError: an answer is an error.
        OSError: the server cannot be reached.
    """
    if not conversations:
        raise BenchError("there is nothing to replay: raise --seconds or --load")
    whole = "\n".join(texts)
    characters = len(whole) / server.post("/tokenize", {"prompt": whole})["count"]
    start = time.perf_counter()

    def client(numbered: tuple[int, Dialogue]) -> list[Replayed]:
        number, conversation = numbered
        time.sleep(max(0.0, start + conversation.start - time.perf_counter()))
        turns = _hold(server, conversation, _Speech(whole, characters, number), start)
        advance()
        return turns

    with ThreadPoolExecutor(len(conversations)) as clients:
        held = list(clients.map(client, enumerate(conversations)))
    counted = [_counted(conversation, turns) for conversation, turns in zip(conversations, held, strict=True)]
    return _outcome([turn for turns in held for turn in turns]), counted


class _Speech:
    """Cuts pieces of about a number of tokens from a text. The same beginning gets the same piece."""

    def __init__(self, text: str, characters: float, number: int) -> None:
        self._text, self._characters = text, characters
        self._at = number * 997 % len(text)

    def beginning(self, number: int, tokens: int) -> str:
        return f"# {number}\n" + self._cut(number * 337 % len(self._text), tokens)

    def next(self, tokens: int) -> str:
        piece = self._cut(self._at, tokens)
        self._at = (self._at + len(piece)) % len(self._text)
        return "\n" + piece

    def _cut(self, at: int, tokens: int) -> str:
        """A piece from the next line on, up to a space: models hardly continue parts of words."""
        length = max(1, round(tokens * self._characters))
        text = self._text[at:] + self._text * (2 + length // len(self._text))
        text = text[text.find("\n") + 1 :]
        return text[: max(text.find(" ", length), 1)]


def _hold(server: ServerAddress, conversation: Dialogue, speech: _Speech, start: float) -> list[Replayed]:
    """All turns of one conversation, one after the other."""
    history = speech.beginning(conversation.beginning, conversation.beginning_tokens)
    replayed = []
    for number, turn in enumerate(conversation.turns):
        if number:
            time.sleep(turn.think)
        history += speech.next(turn.new_tokens)
        sent = time.perf_counter()
        answer = ask(server, history, Workload((), turn.answer_tokens, 0.0))
        replayed.append(Replayed(sent - start, time.perf_counter() - sent, answer))
        history += answer.text
    return replayed


def _counted(planned: Dialogue, turns: Sequence[Replayed]) -> Dialogue:
    """The conversation with its real lengths and times."""
    counted, before, ended = [], planned.beginning_tokens, turns[0].sent
    for turn in turns:
        new = max(1, turn.answer.prompt_tokens - before)
        counted.append(Turn(new, turn.answer.tokens, turn.sent - ended))
        before += new + turn.answer.tokens
        ended = turn.sent + turn.seconds
    return planned._replace(start=turns[0].sent, turns=tuple(counted))


def _outcome(turns: Sequence[Replayed]) -> TurnTimes:
    sent = np.array([turn.sent for turn in turns])
    gained = [tokens for turn in turns for tokens in turn.answer.gap_tokens]
    return TurnTimes(
        arrived=sent,
        first_token=sent + np.array([turn.answer.first_token for turn in turns]),
        ended=sent + np.array([turn.seconds for turn in turns]),
        prompt_tokens=np.array([turn.answer.prompt_tokens for turn in turns], float),
        cached_tokens=np.array([turn.answer.cached_tokens for turn in turns], float),
        answer_tokens=np.array([turn.answer.tokens for turn in turns], float),
        tokens_per_cycle=float(np.mean(gained)) if gained else 1.0,
    )
