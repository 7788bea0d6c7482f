"""What a start says about the engine, line by line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def described(resolved: Mapping[str, Any]) -> list[str]:
    """Model, drafter and KV of a resolved configuration, as `Ready.resolved` has it. An engine without one: nothing."""
    parts = ("model", "device", "speculative", "cache", "scheduler")
    if not all(part in resolved for part in parts):
        return []
    model, device, speculative, cache, scheduler = (resolved[part] for part in parts)
    weights = " ".join(str(each) for each in (model["dtype"], model["quantization"]) if each)
    on = device["device"]
    if on == "cpu":
        on += f", threads: {device['cpu_threads']}, kernels: {device['cpu_kernels']}"
    return [
        f"model       {model['architecture']}, {weights}, on {on}",
        f"drafts      {_drafts(speculative)}",
        f"KV          {cache['max_total_tokens']:,} tokens, {model['context_length']:,} at most for a request, "
        f"{scheduler['max_running_requests']} requests at once",
    ]


def _drafts(speculative: Mapping[str, Any]) -> str:
    if speculative["algorithm"] in (None, "NONE"):
        return "none: plain decoding"
    adaptive = "fixed trees" if speculative["adaptive"] == "off" else "trees follow cost and load"
    return (
        f"{speculative['algorithm']}, {speculative['num_steps']} steps, topk {speculative['eagle_topk']}, "
        f"{speculative['num_draft_tokens']} nodes at most; {adaptive}"
    )
