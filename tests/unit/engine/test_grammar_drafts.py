"""Drafted tokens use up the limits of a grammar's matcher. The text alone decides whether a limit ends its request."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import llguidance
import numpy as np
import pytest
from numpy.typing import NDArray

from eagle_server.engine.grammars import matcher as grammar_matcher_module
from eagle_server.engine.grammars.check import limits
from eagle_server.engine.grammars.grammars import Grammars
from eagle_server.engine.grammars.matcher import LLGuidanceMatcher, MaskBudget
from eagle_server.engine.grammars.sources import llguidance_source
from eagle_server.plan import allows
from eagle_server.request import Grammar
from tests.support.covering import deep_unless
from tests.support.grammars import ALTERNATIVES, GRAMMARS, VOCAB, json_tokenizer, unhurried

Make = Callable[[], llguidance.LLMatcher]
IDS = json_tokenizer().get_vocab()
# A text of b needs one state of the lexer, each other one some of its own: where the last `a`s stood.
STATES = Grammar(kind="regex", source="b*([ab]*a[ab]{12})?")
NESTED = Grammar(kind="ebnf", source='root ::= "b"* ("(" a)?\na ::= a a a | "a" a? | "ab" a | ""')


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    return Grammars(json_tokenizer, VOCAB, [0]).preload().result()[0]


def maker(tokenizer: llguidance.LLTokenizer, grammar: Grammar, **fewer: int) -> Make:
    own = llguidance.LLParserLimits(verbose_errors=False, **fewer) if fewer else limits()
    return partial(llguidance.LLMatcher, tokenizer, llguidance_source(grammar), log_level=0, limits=own)


def run_now(compute: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()
    compute()
    future.set_result(None)
    return future


def new(make: Make, submit: Any = run_now, budget: MaskBudget | None = None) -> LLGuidanceMatcher:
    return LLGuidanceMatcher(make, VOCAB, 0, [0], submit, budget or unhurried())


def spelled(text: str) -> list[int]:
    return [IDS[letter] for letter in text]


def allowed(mask: NDArray[np.int32]) -> list[int]:
    return [token for token in range(VOCAB) if allows(mask, token)]


def plain_mask(make: Make, tokens: list[int]) -> list[int] | None:
    """The tokens allowed after a text, found as plain decoding finds them; None: a limit ends its request."""
    matcher, mask = new(make), None
    for length in range(len(tokens) + 1):
        mask = matcher.mask(tokens[:length])
    assert mask is not None
    return None if matcher.failure else allowed(mask)


def draft(matcher: LLGuidanceMatcher, tokens: list[int], path: tuple[int, ...]) -> bool:
    """Ask for the masks along a path, as drafters do. False: one of its tokens has none, though it is allowed."""
    for length in range(len(path)):
        mask = matcher.mask(tokens, path[:length])
        assert mask is not None
        assert allows(mask, path[length])
        if matcher.mask(tokens, path[: length + 1]) is None:
            return False
    return True


def ab_paths(seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices("ab", k=10)) for _ in range(30)]


@dataclass
class Threads:
    """What was submitted runs when it is told to."""

    waiting: list[tuple[Callable[[], None], Future[None]]] = field(default_factory=list)

    def submit(self, compute: Callable[[], None]) -> Future[None]:
        self.waiting.append((compute, Future()))
        return self.waiting[-1][1]

    def finish(self) -> None:
        compute, future = self.waiting.pop()
        compute()
        future.set_result(None)


# For each limit: a grammar, how far llguidance may go, and drafts that go further. Texts of b stay far below.
LIMITS: dict[str, tuple[Grammar, dict[str, int], list[str]]] = {
    "items of a row": (ALTERNATIVES, {}, ["("]),
    "items of a step": (NESTED, {"step_max_items": 400}, ["(" + "a" * 20]),
    "lexer states": (STATES, {"max_lexer_states": 40}, ab_paths(0)),
    "expressions of a step": (STATES, {"step_lexer_fuel": 50}, ab_paths(1)),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_draft_that_reaches_a_limit_does_not_end_its_request(tokenizer: llguidance.LLTokenizer, limit: str) -> None:
    grammar, fewer, paths = LIMITS[limit]
    make = maker(tokenizer, grammar, **fewer)
    matcher, reached = new(make), 0
    for length in range(6):
        text = spelled("b" * length)
        mask = matcher.mask(text)
        assert matcher.failure is None
        assert mask is not None
        assert allowed(mask) == plain_mask(make, text)
        reached += not all(draft(matcher, text, tuple(spelled(path))) for path in paths)
    assert reached > 1  # also that of a matcher that was made anew


def test_states_that_drafts_have_used_up_do_not_end_their_request(tokenizer: llguidance.LLTokenizer) -> None:
    """No draft reaches the limit. The text does, because of the drafts: a thread makes a matcher anew and reads it."""
    threads, make, text = Threads(), maker(tokenizer, STATES, max_lexer_states=40), list[int]()
    matcher, anew = new(make, threads.submit), []
    for letter in "abaabbab":
        if not matcher.is_ready(text):
            assert not matcher.is_ready(text)
            anew.append(len(text))
            threads.finish()
        assert matcher.is_ready(text)
        assert not threads.waiting
        mask = matcher.mask(text)
        assert matcher.failure is None
        assert mask is not None
        assert allowed(mask) == plain_mask(make, text)
        assert text or draft(matcher, text, tuple(spelled("aaaaaa")))
        text.append(IDS[letter])
    assert anew == [0, 5]


def test_a_long_text_is_read_again_however_long_it_takes(
    tokenizer: llguidance.LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its masks has the time that it has in plain decoding."""
    budget, ticks = unhurried(), itertools.count()
    budget.longest = 0.1
    monkeypatch.setattr(grammar_matcher_module.time, "thread_time", lambda: 0.04 * next(ticks))
    matcher, text = new(maker(tokenizer, ALTERNATIVES), budget=budget), list[int]()
    for _ in range(100):
        assert matcher.mask(text) is not None
        text.append(IDS["b"])
    assert not draft(matcher, text, (IDS["("],))
    text.append(IDS["b"])
    assert matcher.mask(text) is not None
    assert matcher.failure is None


class RandomGrammars:
    """Small grammars of all kinds over the same few letters, often ambiguous, nested or empty."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def grammar(self) -> Grammar:
        kind = self._chance.choice(["ebnf", "regex", "json_schema"])
        if kind == "regex":
            return Grammar(kind="regex", source=self._regex(4))
        if kind == "json_schema":
            return Grammar(kind="json_schema", source=json.dumps(self._schema(2)))
        names = [f"r{n}" for n in range(self._chance.randint(1, 4))]
        rules = [f'{name} ::= {self._rule(3, names)} | "{self._chance.choice("ab1")}"' for name in names]
        return Grammar(kind="ebnf", source="\n".join([f"root ::= {self._rule(2, names)}", *rules]))

    def _rule(self, depth: int, names: list[str]) -> str:
        pick, inner = self._chance.choice, partial(self._rule, depth - 1, names)
        if not depth or self._chance.random() < 0.3:
            return pick([f'"{"".join(self._chance.choices("ab1, ", k=2))}"', "[ab]", "[^a]", *names, *names])
        joint = pick([" | ", " "])
        return f"({joint.join(inner() for _ in range(self._chance.randint(1, 3)))}){pick(['', '*', '+', '?', '{1,3}'])}"

    def _regex(self, depth: int) -> str:
        if not depth:
            return self._chance.choice(["a", "b", "[ab]", ".", "[^b]", "ab"])
        one, two = self._regex(depth - 1), self._regex(depth - 1)
        return self._chance.choice([f"{one}{two}", f"({one}|{two})", f"({one})*", f"({one}){{0,20}}"])

    def _schema(self, depth: int) -> dict[str, Any]:
        pick = self._chance.choice
        if not depth:
            return pick([{}, {"type": "integer"}, {"type": "string", "maxLength": 3}, {"enum": ["a", "ab", 1]}])
        one, two = self._schema(depth - 1), self._schema(depth - 1)
        return pick(
            [
                {"type": "array", "items": one},
                {"type": "object", "properties": {"a": one, "b": two}, "required": pick([[], ["b"]])},
                {"anyOf": [one, two]},
            ]
        )

    def limits(self) -> dict[str, int]:
        """Often so low that a few tokens reach them."""
        if self._chance.random() < 0.3:
            return {}
        return {
            "max_items_in_row": self._chance.choice([10, 20, 50, 2000]),
            "step_max_items": self._chance.choice([50, 100, 300, 5000]),
            "max_lexer_states": self._chance.choice([30, 60, 100, 50_000]),
            "step_lexer_fuel": self._chance.choice([200, 500, 2000, 50_000]),
        }


def draft_tree(matcher: LLGuidanceMatcher, tokens: list[int], chance: random.Random) -> list[tuple[int, ...]]:
    """Ask for the masks of a random tree, in the order of its growth. Returns the paths that have one."""
    known: list[tuple[int, ...]] = [()]
    for _ in range(chance.randrange(20)):
        path = chance.choice(known[-4:])
        mask = matcher.mask(tokens, path)
        assert mask is not None
        fitting = allowed(mask)
        token = chance.choice(fitting) if fitting and chance.random() < 0.9 else chance.randrange(VOCAB)
        if matcher.mask(tokens, (*path, token)) is not None and (*path, token) not in known:
            known.append((*path, token))
    return known[1:]


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(n, n + 100), marks=deep_unless(n == 0)) for n in range(0, 600, 100)], ids=str
)
def test_after_any_drafts_the_mask_of_the_text_is_a_new_matchers(
    tokenizer: llguidance.LLTokenizer, seeds: range
) -> None:
    """Random grammars, limits, drafted trees, and texts that go on along drafted paths or beside them."""
    compared = anew = 0
    for seed in seeds:
        chance = random.Random(seed)
        own = RandomGrammars(chance)
        try:
            make = maker(tokenizer, own.grammar(), **own.limits())
        except ValueError:
            continue  # it matches nothing, or its source is wrong
        matcher, text = new(make), list[int]()
        for _ in range(12):
            expected, mask = plain_mask(make, text), matcher.mask(text)
            if expected is None:
                break  # plain decoding ends here
            assert matcher.failure is None, seed
            assert mask is not None
            assert allowed(mask) == expected, seed
            compared += 1
            paths = draft_tree(matcher, text, chance)
            anew += matcher._matcher is None
            following = [(token,) for token in expected if token]
            if not following:
                break
            text.extend(chance.choice(paths if paths and chance.random() < 0.5 else following))
    assert compared > 300
    assert anew > 10


def test_a_text_that_reaches_a_limit_ends_its_request(tokenizer: llguidance.LLTokenizer) -> None:
    matcher = new(maker(tokenizer, ALTERNATIVES))
    assert not draft(matcher, spelled("b"), (IDS["("],)), "no mask, and no failure"
    assert matcher.failure is None
    mask = matcher.mask(spelled("b("))
    assert mask is not None
    assert not mask.any()
    assert "Current row has 2041 items; max is 2000" in str(matcher.failure)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_paths_that_no_grammar_allows_change_no_mask(tokenizer: llguidance.LLTokenizer, kind: str) -> None:
    """Random tokens are forced on the matcher, as a limit that is reached half-way along a path leaves it."""
    make = maker(tokenizer, GRAMMARS[kind])
    for seed in range(8):
        chance, matcher, text = random.Random(seed), new(make), list[int]()
        for _ in range(6):
            mask = matcher.mask(text)
            assert mask is not None
            assert allowed(mask) == plain_mask(make, text)
            for _ in range(3):
                matcher._move_to(tuple(chance.randrange(1, VOCAB) for _ in range(chance.randrange(1, 5))))
            fitting = [token for token in allowed(mask) if token]
            if not fitting:
                break
            text.append(chance.choice(fitting))
        assert matcher.failure is None
