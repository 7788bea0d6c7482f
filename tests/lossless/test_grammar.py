"""With a grammar, output with speculation equals output without, and it matches the grammar."""

from __future__ import annotations

import json
import re
import string
from typing import Any

import pytest
from msgspec.structs import replace as with_fields
from tokenizers import Tokenizer

from eagle_server.engine.engine import Engine
from eagle_server.engine.grammars.grammars import Grammars
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.request import DraftTree, FinishReason, Grammar, Request
from tests.lossless.conftest import Drafting
from tests.lossless.scenes import as_on_a_gpu, prompt
from tests.support.engines import (
    Finished,
    admit_without_reserve,
    plain,
    random_head,
    random_target,
    request,
    run,
    speculative,
)
from tests.support.grammars import ALTERNATIVES, GRAMMARS, VOCAB, json_tokenizer, unhurried
from tests.support.thinning import thinned

TOKENIZER = {"tokenizer": json_tokenizer, "mask_budget": unhurried()}
PROMPT = list(range(1, 40))
KINDS = [*GRAMMARS, None]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return random_target(VOCAB)


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> dict[str, Finished]:
    """Outputs of plain decoding, one request at a time."""
    engine = plain(target, stand_ins=TOKENIZER)
    return {each.request_id: run(engine, [each])[each.request_id] for each in requests()}


def requests(**settings: Any) -> list[Request]:
    out = []
    for number, kind in enumerate(KINDS):
        for temperature in (0.0, 1.0):
            own: dict[str, Any] = {"grammar": kind and GRAMMARS[kind], "seed": number, "temperature": temperature}
            if kind is not None:  # a random target would write only the white space that JSON allows
                own["logit_bias"] = tuple((1 + string.printable.index(space), -100.0) for space in " \t\n\r")
            own |= {"max_tokens": 40, "presence_penalty": 0.5 * (number % 2), **settings}
            out.append(request(f"{kind} {temperature:g}", PROMPT[number:], **own))
    return out


def eagle3(target: TargetModel, **settings: Any) -> Engine:
    return speculative(target, random_head(target, "EAGLE3"), 3, 8, stand_ins=TOKENIZER, **settings)


def ragged(target: TargetModel, **settings: Any) -> Engine:
    return thinned(eagle3(target, **settings))


def ngram(target: TargetModel, **settings: Any) -> Engine:
    return plain(target, stand_ins=TOKENIZER, **{"ngram_steps": 5, "nodes": 9, **settings})


def spelled(finished: Finished) -> str:
    tokenizer = json_tokenizer()
    return tokenizer.decode(finished.tokens, skip_special_tokens=True)


def test_plain_texts_match_their_grammars(texts: dict[str, Finished]) -> None:
    ended = {name: spelled(text) for name, text in texts.items() if text.reason is FinishReason.STOP}
    for name, text in ended.items():
        kind = name.split()[0]
        if kind == "regex":
            assert re.fullmatch(GRAMMARS["regex"].source, text)
        if kind == "choice":
            assert text in json.loads(GRAMMARS["choice"].source)
        if kind.startswith("json"):
            assert isinstance(json.loads(text), dict)
    assert {"json_schema", "regex", "choice"} <= {name.split()[0] for name in ended}


@pytest.mark.parametrize("build", [eagle3, ragged, ngram])
@pytest.mark.parametrize("scene", ["batch", "preempted"])
def test_texts_with_speculation_equal_texts_without(
    target: TargetModel, texts: dict[str, Finished], build: Any, scene: str
) -> None:
    settings = {"batch": {}, "preempted": {"max_total_tokens": 112, "page_size": 4}}[scene]
    engine = build(target, **settings)
    admit_without_reserve(engine.scheduler)
    outcome = run(engine, requests())
    for name, text in texts.items():
        assert (outcome[name].tokens, outcome[name].reason) == (text.tokens, text.reason), name
    if scene == "preempted":
        assert engine.stats().preemptions > 0
    with_grammar = [outcome[name].spec for name in texts if not name.startswith("None")]
    accepted = sum(spec.accepted for spec in with_grammar if spec is not None)
    assert 0 < accepted < sum(spec.drafted for spec in with_grammar if spec is not None)


def test_prompts_in_the_cache_change_nothing(target: TargetModel, texts: dict[str, Finished]) -> None:
    engine = eagle3(target, page_size=4)
    run(engine, requests())
    outcome = run(engine, requests())
    assert all(finished.cached_tokens > 0 for finished in outcome.values())
    assert {name: finished.tokens for name, finished in outcome.items()} == {n: t.tokens for n, t in texts.items()}


def test_an_invalid_grammar_is_refused_and_other_requests_do_not_change(
    target: TargetModel, texts: dict[str, Finished]
) -> None:
    wrong = {
        "grammar cannot be followed": {"grammar": Grammar(kind="regex", source="(a")},
        "ignore_eos: with a grammar": {"grammar": GRAMMARS["regex"], "ignore_eos": True},
    }
    refused = [request(reason, PROMPT, **settings) for reason, settings in wrong.items()]
    outcome = run(eagle3(target), [*refused, requests()[0]])
    for reason in wrong:
        assert outcome[reason].reason is FinishReason.REFUSED
        assert (outcome[reason].error or "").startswith(reason)
    name = requests()[0].request_id
    assert outcome[name].tokens == texts[name].tokens


def test_other_requests_run_and_aborts_are_answered_while_a_grammar_is_compiled(target: TargetModel) -> None:
    engine = eagle3(target)
    large = {"type": "object", "properties": {f"key{i}": {"type": "string", "maxLength": 99} for i in range(40)}}
    grammar = Grammar(kind="json_schema", source=json.dumps(large))
    engine.add(request("waits", PROMPT, grammar=grammar))
    assert engine.stats().waiting == 1
    assert not engine.flush_cache().is_done
    assert set(run(engine, [request("neighbour", PROMPT)])) >= {"neighbour"}
    engine.add(request("gone", PROMPT, grammar=Grammar(kind="ebnf", source='root ::= "b"')))
    engine.abort("gone")
    assert run(engine, [])["gone"].reason is FinishReason.ABORT


def test_drafts_beyond_the_limits_of_a_grammar_end_no_request(target: TargetModel) -> None:
    """The prompts offer brackets to n-grams. No text has one: the grammar is beyond the limits there."""
    ids = json_tokenizer().get_vocab()
    bias = ((ids["("], -100.0), *((ids[letter], 5.0) for letter in "abc"))
    own: dict[str, Any] = {"grammar": ALTERNATIVES, "logit_bias": bias, "temperature": 1.0}
    prompts = [[ids[letter] for letter in f"{'abc'[n % 3]}(" * 8] for n in range(6)]
    asked = [request(n, prompt, seed=n, **own) for n, prompt in enumerate(prompts)]
    outcome, expected = run(ngram(target), asked), run(plain(target, stand_ins=TOKENIZER), asked)
    assert {n: (f.tokens, f.reason) for n, f in outcome.items()} == {
        n: (f.tokens, f.reason) for n, f in expected.items()
    }
    assert {finished.reason for finished in outcome.values()} <= {FinishReason.STOP, FinishReason.LENGTH}


LETTERS = Grammar(kind="regex", source="(([a-m][n-z]){1,2}[A-Z0-9]|[0-9]{2}[ab ]|[C-Z][c-x]{3}){12}")
WITHOUT_GRAMMAR, WITH_GRAMMAR = [0, 1], [2, 3, 4]


def joined() -> tuple[list[Request], dict[int, list[Request]]]:
    """Two requests without a grammar, and three that join them with a grammar and return their trees."""
    settings = [
        {"temperature": 0.7 * (n % 2), "seed": n, "ignore_eos": n in WITHOUT_GRAMMAR, "max_tokens": 40}
        for n in range(5)
    ]
    free = [request(n, prompt(20 + n, n), **settings[n]) for n in WITHOUT_GRAMMAR]
    with_grammar = [request(n, prompt(9 + n, n), grammar=LETTERS, **settings[n]) for n in WITH_GRAMMAR]
    return free, {3: [with_fields(each, trees=True) for each in with_grammar]}


# Every drafter that uses the token mask. The gate has the mixture instead of its two sources.
SLOWER = ("EAGLE3", "NGRAM", "EAGLE3 static tree", "STANDALONE", "REDRAFTER")
DRAFTERS = ["MEDUSA unsorted", "EAGLE3+NGRAM", *(pytest.param(n, marks=pytest.mark.deep) for n in SLOWER)]


@pytest.mark.parametrize("drafting", DRAFTERS, indirect=True)
def test_no_drafter_drafts_what_a_grammar_forbids(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    """With emulated graphs: cycles without grammars are captured and replayed before, between and after the others."""
    file = str(drafting.pair.directory / "tokenizer.json")
    settings = as_on_a_gpu()
    reading = {"tokenizer": lambda: Tokenizer.from_file(file), "mask_budget": unhurried()}
    settings["stand_ins"].update(reading)
    engine = drafting.engine(**settings)
    trees: list[tuple[str, DraftTree | None, list[int]]] = []
    step = engine.step

    def watched() -> Any:
        deltas = step()
        trees.extend((delta.request_id, delta.tree, delta.token_ids) for delta in deltas)
        return deltas

    monkeypatch.setattr(engine, "step", watched)
    free, joining = joined()
    captured = len(engine.worker.verifier.graphs.keys)
    outcome = run(engine, free, joining=joining)
    assert len(engine.worker.verifier.graphs.keys) == captured
    slow = plain(drafting.pair.target, stand_ins=reading)
    expected = run(slow, [*free, *joining[3]])
    assert {n: f.tokens for n, f in outcome.items()} == {n: f.tokens for n, f in expected.items()}
    compiled = Grammars(lambda: Tokenizer.from_file(file), 64, [63]).compile(LETTERS).result()
    for number in map(str, WITH_GRAMMAR):
        text, drafted = list[int](), 0
        for tree, tokens in [(tree, tokens) for name, tree, tokens in trees if name == number]:
            for node in range(1, 0 if tree is None else len(tree.token_ids)):
                *path, token = path_to(tree, node)
                own = text + path + [token] * (token != 63)
                matcher = compiled.make()
                assert matcher.try_consume_tokens(own) == len(own), (text, path, token)
                assert token != 63 or matcher.is_accepting()
                drafted += 1
            text += tokens
        spec = outcome[number].spec
        assert spec is not None
        assert 0 < spec.accepted < spec.drafted == drafted


def path_to(tree: DraftTree | None, node: int) -> list[int]:
    path: list[int] = []
    while tree is not None and node > 0:
        path.insert(0, tree.token_ids[node])
        node = tree.parents[node]
    return path
