"""The peer that we compare with: transformers' `generate` over the same weights, in the same run."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch

from eagle_server.models.targets.decoder import TargetModel
from eagle_tools.bench.gpu.engines import BenchEngines
from eagle_tools.bench.gpu.steady import Steady


def transformers_peer(engines: BenchEngines) -> dict[str, Any]:
    """Greedy tokens/s of one prompt: transformers (sdpa, dynamic cache), plain and speculative."""
    count = engines.scale.peer_tokens
    prompt = engines.prompts[0]
    model = in_transformers(engines.pair.target)
    generated = [0]

    def generate(tokens: int) -> float:
        engines.machine.synchronize()
        began = time.perf_counter()
        generated[:] = _generate(model, prompt, tokens, engines.device)
        engines.machine.synchronize()
        return time.perf_counter() - began

    generate(2)
    short, long = generate(2), generate(2 + count)  # the difference excludes the prompt, which both compute
    document: dict[str, Any] = {"transformers_tokens_per_second": count / (long - short), "tokens": len(generated)}
    for name in ("plain", "speculative"):
        with Steady(engines.make(speculative=name == "speculative"), [prompt], count) as run:
            document[f"{name}_tokens_per_second"] = run.cycles(max(2, count // 4)).tokens_per_second
            pairs = zip(generated, run.tokens["0"], strict=False)
            document[f"{name}_tokens_alike"] = next((i for i, (a, b) in enumerate(pairs) if a != b), len(generated))
    return document


def in_transformers(target: TargetModel) -> Any:
    """transformers' Llama over the weights of `target`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = target.config
    make: Any = LlamaConfig  # its annotations lack the arguments of its base classes
    config = make(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        rms_norm_eps=ours.rms_norm_eps,
        max_position_embeddings=ours.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope.theta},
        tie_word_embeddings=ours.tie_word_embeddings,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    weights = {name: view.detach() for name, view in target.weight_views()}
    if ours.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    # Its buffers are not in any checkpoint. They are made again, on the device of the weights.
    with torch.device(target.embed.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _generate(model: Any, prompt: list[int], tokens: int, device: torch.device) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]
