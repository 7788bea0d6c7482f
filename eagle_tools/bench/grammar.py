"""python -m eagle_tools.bench.grammar: the demo answers random JSON schemas; every answer is parsed."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from eagle_server.engine.engine import Engine
from eagle_server.engine.grammars.grammars import Grammars
from eagle_server.request import FinishReason, Grammar, Ready, Request, SamplingParams
from eagle_server.text.tokenizer import load_tokenizer
from eagle_tools import DEMO
from eagle_tools.bench.demo import demo_engine, held_out

NAMES = ("name", "size", "path", "count", "value", "kind", "x", "is_open", "line no", "größe")
WORDS = ("red", "green", "blue", "on", "off", "unknown")
DEEPEST = 1  # nesting of objects and arrays
REQUIRED = 0.8  # share of the properties
BATCH = 16
PROMPT = 32  # tokens, the last ones of each held-out prompt


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema with few and short values."""
    kinds = ["boolean", "null", "integer", "enum", "string"]
    match "object" if depth == 0 else chance.choice(kinds + ["object", "array"] * (depth < DEEPEST)):
        case "object":
            names = chance.sample(NAMES, chance.randint(1, 2))
            properties = {name: random_schema(chance, depth + 1) for name in names}
            required = [name for name in names if chance.random() < REQUIRED]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            least = chance.randint(0, 1)
            return {
                "type": "array",
                "items": random_schema(chance, depth + 1),
                "minItems": least,
                "maxItems": least + chance.randint(1, 2),
            }
        case "integer":
            low = chance.randint(-100, 100)
            return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 1000)}
        case "enum":
            return {"enum": chance.sample(WORDS, chance.randint(1, len(WORDS)))}
        case "string":
            return {"type": "string", "maxLength": chance.randint(1, 8)}
        case kind:
            return {"type": kind}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value conforms to a schema of `random_schema`."""
    if "enum" in schema:
        return value in schema["enum"]
    properties: dict[str, Any] = schema.get("properties", {})
    kind = schema["type"]
    match value:
        case dict():
            right = kind == "object" and set(schema["required"]) <= value.keys() <= properties.keys()
            right = right and all(fits(value[name], properties[name]) for name in value)
        case list():
            right = kind == "array" and schema["minItems"] <= len(value) <= schema["maxItems"]
            right = right and all(fits(item, schema["items"]) for item in value)
        case bool():
            right = kind == "boolean"
        case int():
            right = kind == "integer" and schema["minimum"] <= value <= schema["maximum"]
        case str():
            right = kind == "string" and len(value) <= schema["maxLength"]
        case _:
            right = value is None and kind == "null"
    return bool(right)


@dataclass
class GrammarRun:
    """The results of all requests."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason | None] = field(default_factory=dict)
    cycles: int = 0
    accepted: int = 0
    seconds: float = 0.0

    @property
    def accept_length(self) -> float:
        """Tokens per forward that verified drafts, bonus included."""
        return 1 + self.accepted / self.cycles if self.cycles else 1.0


def run(engine: Engine, requests: Iterator[Request]) -> GrammarRun:
    """Run all requests, BATCH at a time."""
    outcome, open_requests = GrammarRun(), 0
    start = time.perf_counter()
    following = next(requests, None)
    while following is not None or engine.has_work():
        while following is not None and open_requests < BATCH:
            engine.add(following)
            open_requests += 1
            following = next(requests, None)
        for delta in engine.step():
            outcome.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                outcome.reasons[delta.request_id] = delta.finish_reason
                open_requests -= 1
            if delta.spec is not None:
                outcome.cycles += delta.spec.cycles
                outcome.accepted += delta.spec.accepted
    outcome.seconds = time.perf_counter() - start
    return outcome


def main(argv: Sequence[str]) -> int:
    """Run it; returns 0, or 1 if a finished answer violates its schema or differs from plain decoding."""
    parser = argparse.ArgumentParser(prog="python -m eagle_tools.bench.grammar", description=__doc__)
    parser.add_argument("--generations", type=int, default=1000, help="random schemas, one answer each (1000)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time after which no answer is started (3600)")
    parser.add_argument("--plain", type=int, default=50, help="how many are also decoded without speculation (50)")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens per answer (256)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (1)")
    parser.add_argument("--algorithm", default="EAGLE3", help="the demo's drafter (EAGLE3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of schemas and answers (0)")
    arguments = parser.parse_args(argv)
    chance = random.Random(arguments.seed)
    schemas = [random_schema(chance) for _ in range(arguments.generations)]
    prompts = [prompt[-PROMPT:] for prompt in held_out(32)]

    def requests(count: int, *, with_grammar: bool = True) -> Iterator[Request]:
        end = time.perf_counter() + arguments.seconds
        for number in range(count):
            if time.perf_counter() > end:
                return
            sampling = SamplingParams(
                max_tokens=arguments.max_tokens,
                temperature=arguments.temperature,
                seed=arguments.seed + number,
                grammar=Grammar(kind="json_schema", source=_source(schemas[number])) if with_grammar else None,
            )
            yield Request(request_id=str(number), prompt_token_ids=prompts[number % len(prompts)], sampling=sampling)

    engine = demo_engine(arguments.algorithm, running=BATCH)
    outcome = run(engine, requests(arguments.generations))
    compared = min(arguments.plain, len(outcome.reasons))
    free = run(engine, requests(compared, with_grammar=False))
    plain = run(demo_engine("NONE", running=BATCH), requests(compared))
    equal = sum(outcome.tokens[name] == tokens for name, tokens in plain.tokens.items())
    wrong = _violations(outcome, schemas)
    counts = {reason.value: list(outcome.reasons.values()).count(reason) for reason in FinishReason}
    tokens = sum(map(len, outcome.tokens.values()))
    print(f"generations {len(outcome.reasons)}: " + ", ".join(f"{k} {v}" for k, v in counts.items() if v))
    print(f"of those that stopped, not JSON of their schema: {len(wrong)}")
    print(f"the same text as without speculation: {equal} of {len(plain.tokens)}")
    print(f"tokens {tokens}, accept length {outcome.accept_length:.3f}, {outcome.seconds:.0f} s")
    print(f"accept length of the same prompts without a schema: {free.accept_length:.3f}")
    print(mask_times(engine.ready(), outcome, schemas))
    for schema, text in wrong[:5]:
        print(f"{json.dumps(schema)}\n    {text!r}")
    failed = counts[FinishReason.ERROR.value] + counts[FinishReason.REFUSED.value]
    return int(bool(wrong or failed) or equal < len(plain.tokens))


def mask_times(ready: Ready, outcome: GrammarRun, schemas: Sequence[dict[str, Any]]) -> str:
    """The times of these answers' grammars and of their masks, one after the other: medians and the longest."""
    file = str(DEMO / "target" / "tokenizer.json")
    grammars = Grammars(lambda: Tokenizer.from_file(file), ready.vocab_size, ready.eos_token_ids)
    grammars.preload().result()
    compiling, masks = list[float](), list[float]()
    for name, tokens in outcome.tokens.items():
        started = time.perf_counter()
        compiled = grammars.compile(Grammar(kind="json_schema", source=_source(schemas[int(name)]))).result()
        compiling.append(time.perf_counter() - started)
        matcher = compiled.matcher(0, ready.eos_token_ids)
        for length in range(len(tokens)):
            started = time.perf_counter()
            matcher.mask(tokens[:length])
            masks.append(time.perf_counter() - started)
    per_second, median, longest = len(masks) / sum(masks), statistics.median(masks), max(masks)
    return (
        f"grammars compile in {statistics.median(compiling) * 1e3:.1f} ms, at most {max(compiling) * 1e3:.1f} ms\n"
        f"masks: {per_second:.0f} per second, {median * 1e6:.0f} us, at most {longest * 1e3:.1f} ms"
    )


def _source(schema: dict[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)


def _violations(outcome: GrammarRun, schemas: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """(schema, text) of the finished answers that violate their schema."""
    tokenizer = load_tokenizer(str(DEMO / "target"))
    finished = [name for name, reason in outcome.reasons.items() if reason is FinishReason.STOP]
    answers = [(schemas[int(name)], tokenizer.decode(outcome.tokens[name])) for name in finished]
    return [(schema, text) for schema, text in answers if not _parses(text, schema)]


def _parses(text: str, schema: dict[str, Any]) -> bool:
    try:
        return fits(json.loads(text), schema)
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
