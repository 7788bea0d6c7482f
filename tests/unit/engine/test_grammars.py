"""Grammars of one request: token masks of a tree, and grammars that cannot be compiled."""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from eagle_server.engine.grammars import DEEPEST, LONGEST, CompiledGrammar, Grammars
from eagle_server.plan import GrammarMatcher
from eagle_server.request import Grammar
from eagle_server.speculation.transforms import Masks, PenalizerState, Rows
from eagle_server.worker.verify_token_mask import tree_masks
from tests.support.grammars import GRAMMARS, VOCAB, json_tokenizer

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(json_tokenizer, VOCAB, [0])


def compiled(grammars: Grammars, kind: str) -> CompiledGrammar:
    return grammars.compile(GRAMMARS[kind]).result()


def allowed(mask: np.ndarray) -> set[int]:
    return {token for token in range(VOCAB) if int(mask[token // 32]) >> token % 32 & 1}


def root_mask(grammar_matcher: GrammarMatcher, text: list[int]) -> np.ndarray:
    return tree_masks(grammar_matcher, text, [text[-1]], [-1])[0]


def brute_force(found: CompiledGrammar, output: list[int]) -> set[int] | None:
    """The tokens that a new matcher accepts after `output`; None if it does not accept `output`."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(found.grammar)
    if not all(matcher.accept_token(token) for token in output):
        return None
    out = set()
    for token in range(VOCAB):
        if matcher.accept_token(token):
            out.add(token)
            matcher.rollback(1)
    return out


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
        first = tree_masks(grammar_matcher, PROMPT + output, tokens, parents)
        again = tree_masks(grammar_matcher, PROMPT + output, tokens, parents)  # the matcher was rolled back
        assert (first == again).all()
        for node in range(len(tokens)):
            path = path_to(tokens, parents, node)
            expected = None if 0 in path else brute_force(found, output + path)
            dead += expected is None
            assert allowed(first[node]) == (set(range(VOCAB)) if expected is None else expected), (output, path)
        choices = sorted(allowed(first[0]) - {0})
        output += [chance.choice(choices)] if choices else []
    assert dead > 0


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
    assert grammars.compile(GRAMMARS["choice"]).result().size > 0
    assert grammars.preload() is ahead
    assert reads == [1]


def schema(value: dict[str, Any], kind: Literal["json_schema", "structural_tag"] = "json_schema") -> Grammar:
    return Grammar(kind=kind, source=json.dumps(value, separators=(",", ":")))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(kind="json_schema", source='{"type": "objec"}'), 'Unsupported type "objec"'),
        (Grammar(kind="json_schema", source="false"), "cannot accept any value"),
        (Grammar(kind="regex", source="(a"), "parenthesis is not closed"),
        (Grammar(kind="ebnf", source="root ::= other"), '"other" is not defined'),
        (Grammar(kind="regex", source="(" * 50_000 + "a" + ")" * 50_000), f"deeper than {DEEPEST}"),
        (Grammar(kind="ebnf", source="root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000), f"deeper than {DEEPEST}"),
        (Grammar(kind="regex", source="(a}" * 50_000 + ")" * 50_000), f"deeper than {DEEPEST}"),
        (schema({"items": [{"pattern": "(a" * 9_000 + ")" * 9_000}]}), f"deeper than {DEEPEST}"),
        (schema({"patternProperties": {"(a}" * 9_000 + ")" * 9_000: {}}}), f"deeper than {DEEPEST}"),
        (schema({"pattern": "(a" * 9_000 + ")" * 9_000}, "structural_tag"), f"deeper than {DEEPEST}"),
        (schema({"enum": ["a" * LONGEST]}), f"more than {LONGEST} characters"),
        (Grammar(kind="json_schema", source='{"items":' * 900 + "{}" + "}" * 900), f"deeper than {DEEPEST}"),
    ],
)
def test_what_does_not_compile_says_why_in_one_line(grammars: Grammars, grammar: Grammar, reason: str) -> None:
    with pytest.raises(ValueError, match="grammar: this") as error:
        grammars.compile(grammar).result()
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert ".cc" not in str(error.value)


@pytest.mark.slow
def test_a_chain_of_references_overflows_no_stack(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack overflow would end the process. This chain is longer than the allowed length."""
    monkeypatch.setattr("eagle_server.engine.grammars.LONGEST", 1 << 20)
    count = 6000
    row = {f"{n}": {"type": "object", "properties": {"b": {"$ref": f"#/{n + 1}"}}} for n in range(count)}
    long = schema({"type": "object", "properties": {"x": {"$ref": "#/0"}}, **row, f"{count}": {}})
    assert grammars.compile(long).result().size


def test_brackets_in_texts_are_not_nesting(grammars: Grammars) -> None:
    named = schema({"type": "object", "properties": {"pattern": {"type": "string", "pattern": r"\((a|\(b\))[(]*"}}})
    assert grammars.compile(named).result().size
    regex = Grammar(kind="regex", source=r"\(" * 300 + "[([{]" * 300)
    ebnf = Grammar(kind="ebnf", source='root ::= "' + "(" * 300 + '"')
    assert all(grammars.compile(grammar).result().size for grammar in (regex, ebnf))


def test_masks_forbid_tokens_without_a_bit() -> None:
    bits = torch.tensor([[[0b101, -1], [-1, 0b10]]], dtype=torch.int32)
    logits = torch.zeros(2, 2, 40)
    Masks((1,), bits).apply(logits, Rows(torch.zeros(2, 2, dtype=torch.int64), None, PenalizerState()))
    assert (logits[0] == 0).all()
    assert [token for token in range(40) if logits[1, 0, token] == 0] == [0, 2, *range(32, 40)]
    assert [token for token in range(40) if logits[1, 1, token] == 0] == [*range(33)][:32] + [33]
