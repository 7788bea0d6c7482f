"""The embedded demo as an engine in this process, and its measurement with one request at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_server.config import parse_args
from eagle_server.engine.assembly.from_config import build_engine
from eagle_server.engine.engine import Engine
from eagle_server.request import Request, SamplingParams
from eagle_server.text.tokenizer import load_tokenizer
from eagle_tools import DEMO

FIXED = ("--speculative-adaptive", "off")  # every cycle drafts the whole tree


@dataclass
class Tally:
    """Counts of one drafter on one kind of text, without the first token of each answer (drawn after the prompt)."""

    tokens: int = 0
    forwards: int = 0
    drafting: int = 0  # forwards that verified drafts
    accepted: int = 0
    seconds: float = 0.0

    @property
    def accept_length(self) -> float:
        """Tokens per forward that verified drafts, the bonus included."""
        return self.accepted / self.drafting + 1 if self.drafting else 1.0

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards


def demo_engine(algorithm: str, *flags: str, threads: int = 1, running: int = 1) -> Engine:
    """The demo with one of its drafters, for at most `running` requests at a time.

    Its trees do not follow the load unless `flags` say so.
    """
    common = ["--disable-radix-cache", "--max-running-requests", str(running), "--cpu-threads", str(threads)]
    fixed = () if algorithm == "NONE" else FIXED
    config = parse_args(["--speculative-algorithm", algorithm, *common, *fixed, *flags], environ={})
    return build_engine(config, progress=False)


def held_out(count: int) -> list[list[int]]:
    """The first `count` of the demo's held-out prompts, as token ids."""
    texts: list[str] = json.loads((DEMO / "prompts.json").read_text())
    tokenizer = load_tokenizer(str(DEMO / "target"))
    return [tokenizer.encode(text) for text in texts[:count]]


def measure(
    engine: Engine,
    name: str,
    prompt: Sequence[int],
    max_tokens: int,
    tally: Tally,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Run one request alone and add it to `tally`; returns its tokens."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)
    engine.add(Request(request_id=name, prompt_token_ids=list(prompt), sampling=sampling))
    tokens: list[int] = []
    start = 0.0
    while engine.has_work():
        for delta in engine.step():
            if tokens:
                tally.forwards += 1
                tally.tokens += len(delta.token_ids)
            else:
                start = time.perf_counter()
            tokens.extend(delta.token_ids)
            if delta.spec is not None:
                tally.drafting += delta.spec.cycles
                tally.accepted += delta.spec.accepted
    tally.seconds += time.perf_counter() - start
    return tokens
