"""Grammars of one request: token masks of a tree, and grammars that cannot be compiled."""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import string
import threading
import time
from concurrent.futures import Future
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from eagle_server.engine.grammars import matcher as grammar_matcher_module
from eagle_server.engine.grammars.check import TOO_LARGE, GrammarCheck
from eagle_server.engine.grammars.grammars import CompiledGrammar, Grammars
from eagle_server.engine.grammars.matcher import TOO_SLOW, LLGuidanceMatcher
from eagle_server.plan import GrammarMatcher, allows
from eagle_server.request import Grammar
from eagle_server.speculation.transforms import Masks, PenalizerState, Rows
from eagle_server.worker.batch.verify_token_mask import tree_masks
from tests.support.grammars import GRAMMARS, VOCAB, json_tokenizer, unhurried

PROMPT = [5, 6, 7]
PATIENCE = 60  # seconds; only a hang takes this long


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(json_tokenizer, VOCAB, [0], unhurried())


def compiled(grammars: Grammars, kind: str) -> CompiledGrammar:
    return grammars.compile(GRAMMARS[kind]).result()


def allowed(mask: np.ndarray) -> set[int]:
    return {token for token in range(VOCAB) if int(mask[token // 32]) >> token % 32 & 1}


def root_mask(grammar_matcher: GrammarMatcher, tokens: list[int]) -> np.ndarray:
    return tree_masks(grammar_matcher, tokens, [tokens[-1]], [-1])[0][0]


def brute_force(found: CompiledGrammar, output: list[int]) -> set[int] | None:
    """The tokens that a new matcher accepts after `output`; None if it does not accept `output`."""
    matcher = found.make()
    if matcher.try_consume_tokens(output) < len(output):
        return None
    ends = {0} if matcher.is_accepting() else set[int]()
    return {token for token in range(1, VOCAB) if matcher.validate_tokens([token])} | ends


def random_tree(found: CompiledGrammar, output: list[int], chance: random.Random) -> tuple[list[int], list[int]]:
    """A tree of allowed nodes, forbidden nodes, their descendants, and padding."""
    tokens, parents = [PROMPT[-1] if not output else output[-1]], [-1]
    for _ in range(14):
        parent = chance.randrange(len(tokens))
        path = path_to(tokens, parents, parent)
        fitting = sorted(brute_force(found, output + path) or ())
        token = chance.choice(fitting) if fitting and chance.random() < 0.8 else chance.randrange(-1, VOCAB)
        tokens.append(token)
        parents.append(parent if tokens[parent] >= 0 else 0)
    return tokens, parents


def path_to(tokens: list[int], parents: list[int], node: int) -> list[int]:
    path = []
    while node > 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


@pytest.mark.parametrize("kind", GRAMMARS)
def test_every_nodes_mask_is_what_a_new_matcher_accepts_there(grammars: Grammars, kind: str) -> None:
    found, chance = compiled(grammars, kind), random.Random(kind)
    grammar_matcher: GrammarMatcher = found.matcher(len(PROMPT), [0])
    output: list[int] = []
    dead = 0
    for _ in range(5):
        tokens, parents = random_tree(found, output, chance)
        first, kept = tree_masks(grammar_matcher, PROMPT + output, tokens, parents)
        again, _ = tree_masks(grammar_matcher, PROMPT + output, tokens, parents)  # the matcher was rolled back
        assert (first == again).all()
        for node in range(len(tokens)):
            path = path_to(tokens, parents, node)
            expected = None if 0 in path else brute_force(found, output + path)
            dead += expected is None
            assert kept[node] == (tokens[node] if expected is not None or not node else -1)
            assert allowed(first[node]) == (set(range(VOCAB)) if expected is None else expected), (output, path)
        choices = sorted(allowed(first[0]) - {0})
        output += [chance.choice(choices)] if choices else []
    assert dead > 0


def test_a_path_that_was_left_changes_no_mask(grammars: Grammars) -> None:
    """After a rollback llguidance 1.9.1 alone allows a number after `[8] `, as after `[8, `."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {}}}
    compiled = grammars.compile(Grammar(kind="json_schema", source=json.dumps(schema))).result()
    ids = json_tokenizer().get_vocab()
    matcher, text = compiled.matcher(0, []), [ids[letter] for letter in '{"a": [8']
    for path in (",", "]", ", ", "] "):  # breadth first, as trees grow
        mask = matcher.mask(text, tuple(ids[letter] for letter in path))
        assert mask is not None
        assert allows(mask, ids["7"]) == path.startswith(",")


def test_the_end_is_allowed_only_where_the_grammar_is_complete(grammars: Grammars) -> None:
    grammar_matcher = compiled(grammars, "choice").matcher(0, [0])
    spelled = [json_tokenizer().token_to_id(piece) for piece in ("12", "ab", "12", "a", "b")]
    for length in range(1, 5):
        assert 0 not in allowed(root_mask(grammar_matcher, spelled[:length]))
    assert allowed(root_mask(grammar_matcher, spelled)) == {0}


def test_a_matcher_allows_nothing_after_a_forbidden_token(grammars: Grammars) -> None:
    grammar_matcher = compiled(grammars, "choice").matcher(0, [0])
    assert allowed(root_mask(grammar_matcher, [1])) == set()
    assert grammar_matcher.mask([1], (2,)) is None


def test_the_tokenizer_is_loaded_once_by_preload_or_by_the_first_grammar() -> None:
    reads = []

    def read() -> Tokenizer:
        reads.append(1)
        return json_tokenizer()

    grammars = Grammars(read, VOCAB, [0])
    ahead = grammars.preload()
    assert grammars.compile(GRAMMARS["choice"]).result().source
    assert grammars.preload() is ahead
    assert reads == [1]


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(value))


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


def chain(length: int) -> dict[str, Any]:
    """A schema that refers to a schema, which refers to a schema ..."""
    rows = {f"{n}": {"type": "object", "properties": {"b": {"$ref": f"#/$defs/{n + 1}"}}} for n in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**rows, f"{length}": {}}}


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema({"type": "objec"}), "Invalid type: objec"),
        (schema(False), "schema is false"),
        (schema({"$ref": "#"}), "matches no text"),
        (schema({"type": "string", "enum": [1]}), "Unsatisfiable"),
        (schema({"type": "string", "maxLength": -1}), "maxLength"),
        (schema({"$ref": "http://example.com/a.json"}), "another document"),
        (schema({"properties": {"a/b": {"not": {}, "items": {"if": {}}}}}), "#/properties/a~1b/not"),
        (Grammar(kind="regex", source="(a"), "unclosed group"),
        (Grammar(kind="regex", source="(?=a)b"), "look-around"),
        (Grammar(kind="ebnf", source="root ::= other"), "'other' not found"),
        (Grammar(kind="ebnf", source="root ::= root"), "matches no text"),
        (Grammar(kind="ebnf", source='root ::= "a" ('), "Expected ')'"),
        (Grammar(kind="ebnf", source="start: <|unknown|>"), "llguidance cannot read it"),
        (Grammar(kind="ebnf", source='start: a\na: %json {\n"not": {}}'), "enforced: not"),
        (Grammar(kind="ebnf", source='root ::= "\\U00110000"'), ""),
        (Grammar(kind="json_schema", source='{"maximum": ' + "9" * 5000 + "}"), "a number may be too long"),
        (Grammar(kind="regex", source="(" * 50_000 + "a" + ")" * 50_000), "nest"),
        (Grammar(kind="ebnf", source="root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000), "recursion depth"),
        (schema({"items": [{"pattern": "(a" * 9_000 + ")" * 9_000}]}), "nest"),
        (schema(nested(300)), "recursion limit"),
        (schema(chain(6000)), TOO_LARGE),  # would overflow the stack
        (schema({"allOf": [{"multipleOf": n} for n in (7, 11, 13, 17, 19, 23, 29)]}), TOO_LARGE),  # would take hours
    ],
    ids=lambda value: value.source[:30] if isinstance(value, Grammar) else None,
)
def test_what_does_not_compile_says_why_in_one_line(grammars: Grammars, grammar: Grammar, reason: str) -> None:
    with pytest.raises(ValueError, match="grammar cannot be followed: ") as error:
        grammars.compile(grammar).result()
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert grammars.compile(GRAMMARS["choice"]).result().source  # the next grammar compiles


@pytest.mark.parametrize(
    ("kind", "source", "right", "wrong"),
    [
        ("regex", r"^\d+a/b$", ["12a/b"], ["a/b", "٣a/b"]),
        ("regex", "a.b|[^x]{2}", ["a-b", "a\n"], ["a\nb"]),
        ("choice", '["a\\"b", "\\\\n", "<end>", "/a{2}", "é"]', ['a"b', "\\n", "<end>", "/a{2}", "é"], ["aa", "<"]),
        (
            "ebnf",
            '# words\nroot ::= item ("," ws item)*\nitem ::= [0-9]+ | "\\x41\\u00e9"\nws ::= [ \\t\\n]*',
            ["1, Aé"],
            ["1,"],
        ),
        ("ebnf", 'start: "a" B?\nB: /[0-9]+/', ["a", "a12"], ["12"]),
        (
            "json_schema",
            '{"items": {"type": "integer"}, "minItems": 2, "type": "array"}',
            ["[1,\n 2]"],
            ["[1]", "[1," + " " * 33 + "2]"],
        ),
        ("json_object", "", ['{"a": [1, {}]}'], ["[]", " {}"]),
    ],
)
def test_each_kind_of_grammar_matches_what_it_says(
    grammars: Grammars, kind: Any, source: str, right: list[str], wrong: list[str]
) -> None:
    """Spelled in characters. A text is right if a matcher consumes it all and may end."""
    found, tokenizer = grammars.compile(Grammar(kind=kind, source=source)).result(), json_tokenizer()
    for text in (*right, *wrong):
        matcher = found.make()
        tokens = [tokenizer.token_to_id(character) for character in text.replace("٣", "x")]
        is_right = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert is_right == (text in right), text


AMBIGUOUS = Grammar(
    kind="ebnf",
    source=f"root ::= a\na ::= {' | '.join(f'a{n}' for n in range(20))}\n"
    + "".join(f'a{n} ::= a a | "a"\n' for n in range(20)),
)
STARS = Grammar(kind="regex", source="(" * 25 + "[a-z ]" + "*)" * 25)
DOUBLED = Grammar(kind="regex", source="(([a-z]+ *)+[,.]? *)*")


@pytest.mark.parametrize("grammar", [STARS, DOUBLED, Grammar(kind="regex", source=".*a.{20}")])
def test_the_work_of_a_mask_does_not_grow_with_the_text(grammars: Grammars, grammar: Grammar) -> None:
    """xgrammar needed 287 ms for the mask after 115 tokens, and more after each further one."""
    grammar_matcher, text, seconds = grammars.compile(grammar).result().matcher(0, []), list[int](), list[float]()
    letters = [1 + string.printable.index(letter) for letter in "a bc"]
    for number in range(300):
        started = time.thread_time()
        mask = grammar_matcher.mask(text)
        seconds.append(time.thread_time() - started)
        assert mask is not None
        assert allows(mask, letters[number % 4])
        text.append(letters[number % 4])
    assert statistics.median(seconds[200:]) < 8 * statistics.median(seconds[5:25])


def test_an_ambiguous_grammar_ends_its_own_request_with_a_reason(grammars: Grammars) -> None:
    """llguidance counts the work for a mask."""
    grammar_matcher, text = grammars.compile(AMBIGUOUS).result().matcher(0, []), list[int]()
    while grammar_matcher.failure is None:
        mask = grammar_matcher.mask(text)
        text.append(1 + string.printable.index("a"))
        assert len(text) < 50
    assert "items" in grammar_matcher.failure
    assert mask is not None
    assert not mask.any()


def test_a_mask_that_takes_too_long_ends_its_own_request(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, ab = unhurried(), json_tokenizer().token_to_id("ab")
    budget.longest = 0.1
    grammar_matcher = LLGuidanceMatcher(
        compiled(grammars, "regex").make, VOCAB, 0, [0], lambda compute: Future(), budget
    )
    for length, seconds, failure in ((0, 9.0, None), (1, 0.09, None), (2, 0.11, TOO_SLOW)):
        monkeypatch.setattr(grammar_matcher_module.time, "thread_time", itertools.count(0, seconds).__next__)
        mask = grammar_matcher.mask([ab] * length)
        assert mask is not None
        assert mask.any() == (failure is None)
        assert grammar_matcher.failure == failure


def test_a_slow_mask_is_computed_on_a_thread(grammars: Grammars) -> None:
    """The first mask too, because nothing is known about its time."""
    waiting = list[tuple[Any, Future[None]]]()

    def submit(compute: Any) -> Future[None]:
        waiting.append((compute, Future()))
        return waiting[-1][1]

    def finish() -> None:
        compute, future = waiting.pop()
        compute()
        future.set_result(None)

    found, budget = grammars.compile(Grammar(kind="regex", source="(ab)*1")).result(), unhurried()
    ab = json_tokenizer().token_to_id("ab")
    grammar_matcher, text = LLGuidanceMatcher(found.make, VOCAB, 0, [0], submit, budget), list[int]()
    assert not grammar_matcher.is_ready(text)
    assert not grammar_matcher.is_ready(text)
    assert len(waiting) == 1
    finish()
    assert grammar_matcher.is_ready(text)
    text.append(ab)
    assert grammar_matcher.is_ready(text)  # the first was quick
    assert grammar_matcher.mask(text, (ab,)) is not None
    budget.slow = 0.0
    text.append(ab)
    assert grammar_matcher.is_ready(text)
    assert grammar_matcher.mask(text) is not None
    budget.slow = 60.0
    for _ in range(4):  # each mask of the next four tokens, and nothing is drafted
        text.append(ab)
        assert not grammar_matcher.is_ready(text)
        finish()
        assert grammar_matcher.is_ready(text)
        mask = grammar_matcher.mask(text)
        assert mask is not None
        assert allowed(mask) == brute_force(found, text)
        assert (grammar_matcher.mask(text, (ab,)) is None) == (len(text) < 6)
    text.append(json_tokenizer().token_to_id("1"))
    assert grammar_matcher.is_ready(text)
    assert not waiting


def test_a_mask_that_fails_on_its_thread_ends_its_own_request(grammars: Grammars) -> None:
    def submit(compute: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(MemoryError("too much"))
        return future

    grammar_matcher = LLGuidanceMatcher(compiled(grammars, "regex").make, VOCAB, 0, [0], submit, unhurried())
    assert not grammar_matcher.is_ready([])
    assert grammar_matcher.is_ready([])
    mask = grammar_matcher.mask([])
    assert mask is not None
    assert not mask.any()
    assert grammar_matcher.failure


def test_drafted_tokens_beyond_a_cycles_time_are_cut_from_the_tree(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, ab = compiled(grammars, "regex"), json_tokenizer().token_to_id("ab")
    grammar_matcher, tokens, parents = found.matcher(0, [0]), [ab, ab, ab, ab], [-1, 0, 1, 2]
    monkeypatch.setattr(grammars.budget, "allowance", 60.0)
    _, kept = tree_masks(grammar_matcher, [ab], tokens, parents)
    assert kept == tokens
    grammars.budget.share(1 << 60)  # so many that there is no time for each
    masks, kept = tree_masks(grammar_matcher, [ab, ab], tokens, parents)
    assert kept == [ab, -1, -1, -1]
    assert allowed(masks[0]) == brute_force(found, [ab, ab])


def test_requests_with_the_same_grammar_share_no_limits(grammars: Grammars) -> None:
    """Each of these requests reaches about half of the limit of lexer states."""
    found = grammars.compile(Grammar(kind="regex", source="[abc]*a[abc]{40}")).result()
    letters = [1 + string.printable.index(letter) for letter in "abc"]
    for seed in range(4):
        grammar_matcher, chance, text = found.matcher(0, [0]), random.Random(seed), list[int]()
        for _ in range(250):
            assert grammar_matcher.mask(text) is not None
            text.append(chance.choice(letters))
        assert grammar_matcher.failure is None


def kill(check: GrammarCheck) -> None:
    process = check.start()  # asked once: afterwards it would start another
    process.kill()
    process.wait()


def test_a_check_that_was_killed_is_started_again() -> None:
    check = GrammarCheck(300)
    assert "start" in check.check(GRAMMARS["regex"])
    kill(check)
    assert "start" in check.check(GRAMMARS["regex"])
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        kill(check)
        assert "start" in check.check(GRAMMARS["regex"])
    assert len(os.listdir("/proc/self/fd")) == files
    check.close()


def test_only_what_is_wrong_with_a_grammar_is_remembered(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(check: GrammarCheck, grammar: Grammar) -> str:
        raise OSError("no process can be started")

    grammar, wrong = Grammar(kind="regex", source="remembered"), Grammar(kind="regex", source="(wrong")
    with monkeypatch.context() as patched:
        patched.setattr(GrammarCheck, "check", fail)
        with pytest.raises(OSError, match="no process"):
            grammars.compile(grammar).result()
    assert grammars.compile(grammar).result().source
    first = grammars.compile(wrong)
    with pytest.raises(ValueError, match="unclosed"):
        first.result()
    assert grammars.compile(wrong) is first


def test_requests_with_different_salts_share_no_compiled_grammar(grammars: Grammars) -> None:
    grammar = Grammar(kind="regex", source="salted")
    futures = [grammars.compile(grammar, salt) for salt in (None, "a", "b", "a")]
    assert futures[1] is futures[3]
    assert len(set(map(id, futures))) == 3
    assert len({future.result().source for future in futures}) == 1


def test_clients_take_turns_at_having_their_grammars_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, proceed, check = Queue[str](), threading.Semaphore(0), GrammarCheck.check

    def held(self: GrammarCheck, grammar: Grammar) -> str:
        begun.put(grammar.source)
        assert proceed.acquire(timeout=PATIENCE)
        return check(self, grammar)

    monkeypatch.setattr(GrammarCheck, "check", held)
    flood = [Grammar(kind="regex", source=f"flood{number}") for number in range(24)]
    futures = [grammars.compile(each, client="flood") for each in flood]
    order = [begun.get(timeout=PATIENCE) for _ in range(2)]
    futures.append(grammars.compile(Grammar(kind="regex", source="other"), client="other"))
    for _ in range(23):
        proceed.release()
        order.append(begun.get(timeout=PATIENCE))
    assert order.index("other") <= 3
    proceed.release(2)
    assert all(future.result(PATIENCE).source for future in futures)


def test_a_grammar_that_nobody_waits_for_is_not_compiled(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, proceed, check = Queue[str](), threading.Event(), GrammarCheck.check

    def held(self: GrammarCheck, grammar: Grammar) -> str:
        begun.put(grammar.source)
        assert proceed.wait(PATIENCE)
        return check(self, grammar)

    monkeypatch.setattr(GrammarCheck, "check", held)
    waiting = [Grammar(kind="regex", source=f"waits{number}") for number in range(9)]
    for each in waiting:
        grammars.compile(each)
    running = {begun.get(timeout=PATIENCE) for _ in range(2)}
    for each in waiting:
        grammars.cancel(each)
    proceed.set()
    assert grammars.compile(Grammar(kind="regex", source="cancelled")).result().source
    assert running == {"waits0", "waits1"}
    assert [begun.get_nowait() for _ in range(begun.qsize())] == ["cancelled"]


def test_masks_forbid_tokens_without_a_bit() -> None:
    bits = torch.tensor([[[0b101, -1], [-1, 0b10]]], dtype=torch.int32)
    logits = torch.zeros(2, 2, 40)
    Masks((1,), bits).apply(logits, Rows(torch.zeros(2, 2, dtype=torch.int64), None, PenalizerState()))
    assert (logits[0] == 0).all()
    assert [token for token in range(40) if logits[1, 0, token] == 0] == [0, 2, *range(32, 40)]
    assert [token for token in range(40) if logits[1, 1, token] == 0] == [*range(33)][:32] + [33]
