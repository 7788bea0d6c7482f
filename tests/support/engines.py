"""Engines over tiny models, and runs of requests through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from eagle_server.cache.pool import KVPool
from eagle_server.engine.assembly.assemble import Surroundings, assemble
from eagle_server.engine.engine import Engine
from eagle_server.engine.engine_config import EngineConfig
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.block import BlockConfig, BlockHead
from eagle_server.models.drafts.block_edges import EdgeConfig
from eagle_server.models.drafts.eagle import EagleConfig, EagleHead
from eagle_server.models.drafts.eagle3 import Eagle3Config, Eagle3Head
from eagle_server.models.drafts.interface import DraftHead, TargetWeights
from eagle_server.models.drafts.peagle import PEagleConfig, PEagleHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_server.request import FinishReason, Request, SamplingParams, SpecStats, TokenDelta, TokenLogprob
from eagle_server.scheduling.scheduler import Scheduler
from eagle_server.speculation.tree_config import TreeConfig

CONTEXT = 256
MARGIN = 64  # RoPE rows past the context, for the trees
FIXED_TREES = ("--speculative-adaptive", "off")  # for what is counted: else the load of other tests decides


@dataclass
class Finished:
    """The joined output of one request. `deltas` counts its deltas."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    spec: SpecStats | None = None
    deltas: int = 0

    def take(self, delta: TokenDelta) -> None:
        assert self.reason is None, "a delta after the last one"
        self.deltas += 1
        self.tokens.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.prompt_logprobs.extend(delta.prompt_logprobs or ())
        self.reason, self.error = delta.finish_reason, delta.error
        self.cached_tokens, self.spec = delta.cached_tokens, delta.spec


def request(
    name: object,
    prompt: Sequence[int],
    *,
    choice: int = 0,
    prompt_logprobs: bool = False,
    cache_salt: str | None = None,
    **sampling: Any,
) -> Request:
    """A request. By default it is greedy and has 24 output tokens."""
    params = SamplingParams(**{"max_tokens": 24, "seed": 0, "temperature": 0.0, **sampling})
    return Request(
        request_id=str(name),
        prompt_token_ids=list(prompt),
        sampling=params,
        choice=choice,
        prompt_logprobs=prompt_logprobs,
        cache_salt=cache_salt,
    )


def run(
    engine: Engine,
    requests: Iterable[Request],
    *,
    joining: Mapping[int, Sequence[Request]] | None = None,
    each_cycle: Callable[[int], None] | None = None,
) -> dict[str, Finished]:
    """Run `requests`, and those in `joining` from the given cycle on, to their end. Checks the KV pages every cycle."""
    later = dict(joining or {})
    outcome: dict[str, Finished] = {}
    for each in requests:
        engine.add(each)
    cycle = 0
    while engine.has_work() or later:
        for each in later.pop(cycle, ()):
            engine.add(each)
        for delta in engine.step():
            outcome.setdefault(delta.request_id, Finished()).take(delta)
        engine.scheduler.kv.check()
        if each_cycle is not None:
            each_cycle(cycle)
        cycle += 1
        assert cycle < 100_000, "the engine does not come to an end"
    assert all(finished.reason is not None for finished in outcome.values())
    return outcome


def admit_without_reserve(scheduler: Scheduler) -> None:
    """Admit what fits now, with no KV kept for the growth of outputs, so that requests are preempted."""
    scheduler.queue._reserve = lambda sequence: 0  # type: ignore[method-assign]


def tokens_of(outcome: Mapping[str, Finished]) -> dict[str, list[int]]:
    return {name: finished.tokens for name, finished in outcome.items()}


def tree_size(steps: int, topk: int) -> int:
    """The default `nodes`: steps * topk + 1, or the whole pool and the root if that is smaller."""
    return min(steps * topk, topk + (steps - 1) * topk**2) + 1


def engine_config(**settings: Any) -> EngineConfig:
    """Config of a small engine with poisoned free slots. `settings` are fields of `EngineConfig` or of `TreeConfig`."""
    numbers = {"context_length": CONTEXT, "max_total_tokens": 4096, "poison": True, **settings}
    tree = {each.name: numbers.pop(each.name) for each in fields(TreeConfig) if each.name in numbers}
    return EngineConfig(tree=TreeConfig(**tree), **numbers)


def plain(target: TargetModel, *, stand_ins: Mapping[str, Any] | None = None, **settings: Any) -> Engine:
    """An engine without speculation. `stand_ins`: as `assemble` has them."""
    return assemble(target, None, engine_config(**settings), Surroundings(**(stand_ins or {})))


def speculative(
    target: TargetModel,
    head: DraftHead,
    steps: int = 3,
    topk: int = 4,
    *,
    stand_ins: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Engine:
    tree = {"model_steps": steps, "topk": topk, "nodes": tree_size(steps, topk)}
    return assemble(target, head, engine_config(**{**tree, **settings}), Surroundings(**(stand_ins or {})))


def pools(engine: Engine) -> tuple[KVPool, KVPool | None]:
    """The KV pools of target and draft."""
    drafter = engine.worker.drafter
    reader = getattr(getattr(drafter, "model", drafter), "reader", None)  # a mixture's `model` has it
    attention = getattr(getattr(reader, "pairs", reader), "attention", None)
    return engine.worker.verifier.pool, None if attention is None else attention.pool


def random_config(vocab: int = 48, hidden: int = 32, layers: int = 3, **config: Any) -> dict[str, Any]:
    """The config.json of `random_target`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 0,
        **config,
    }


def random_target(
    vocab: int = 48, hidden: int = 32, layers: int = 3, *, seed: int = 0, std: float = 0.25, **config: Any
) -> TargetModel:
    """A random target with several bits of entropy per next token. Token 0 ends a sequence."""
    raw = random_config(vocab, hidden, layers, **config)
    return randomized(TargetModel(read_target_config(raw), CONTEXT + MARGIN), seed, std)


def random_head(
    target: TargetModel, kind: str, *, seed: int = 1, std: float = 0.25, draft_vocab: int | None = None
) -> DraftHead:
    """An untrained EAGLE, EAGLE3 or PEAGLE head for a target of at least three layers; `draft_vocab`: the first ids."""
    config, layers = target.config, _plain_layers(target, 1)
    borrowed = TargetWeights(target.embed, target.lm_head)
    if kind == "EAGLE":
        eagle: EagleHead = randomized(EagleHead(EagleConfig(layers), CONTEXT + MARGIN, borrowed), seed, std)
        if draft_vocab is not None:
            eagle.restrict_vocabulary(torch.arange(draft_vocab))
        return eagle
    eagle3_config = Eagle3Config(
        layers=layers,
        target_hidden_size=config.hidden_size,
        draft_vocab_size=draft_vocab or config.vocab_size,
        aux_boundaries=(1, 2, config.num_layers),
        vocab_map=draft_vocab is not None,
    )
    head = Eagle3Head(eagle3_config, CONTEXT + MARGIN, borrowed)
    if kind == "PEAGLE":
        head = PEagleHead(PEagleConfig(**vars(eagle3_config), mask_token_id=1), CONTEXT + MARGIN, borrowed)
    eagle3: Eagle3Head = randomized(head, seed, std)
    if draft_vocab is not None:
        eagle3.set_vocabulary(torch.arange(draft_vocab))
    return eagle3


def random_block(
    target: TargetModel, edges: EdgeConfig | None = None, convolution: tuple[int, int] | None = None
) -> BlockHead:
    """An untrained block drafter of 4 drafts, with a causal layer and one that is not."""
    config = BlockConfig(
        layers=_plain_layers(target, 2),
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=target.config.vocab_size,
        aux_boundaries=(1, 2),
        block_size=4,
        mask_token_id=1,
        causal=(True, False),
        next_token=True,
        edges=edges,
        convolution=convolution,
    )
    head: BlockHead = randomized(
        BlockHead(config, CONTEXT + MARGIN, TargetWeights(target.embed, target.lm_head)), 1, 0.25
    )
    return head


def _plain_layers(target: TargetModel, count: int) -> ModelConfig:
    """Layers as wide as the target's, whatever its family."""
    plain = {"sinks": None, "mla": None, "moe": None, "attention_gate": False, "layer_inputs": None}
    plain |= {"head_gate": False, "layer_heads": (), "swiglu_limits": ()}
    return replace(target.config, num_layers=count, windows=(), states=(), **plain)


def randomized(model: Any, seed: int, std: float) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):  # norms keep their initial ones
                parameter.normal_(0.0, std, generator=generator)
    return model.requires_grad_(requires_grad=False).eval()
