"""The padded demo pair, its prompts, and the engines that the parts of the GPU benchmark measure."""

from __future__ import annotations

import copy
import gc
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from eagle_server.engine.assembly.assemble import Surroundings, assemble
from eagle_server.engine.engine import Engine
from eagle_server.engine.engine_config import EngineConfig
from eagle_server.models.drafts.interface import DraftHead
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.speculation.tree_config import TreeConfig
from eagle_tools import DEMO
from eagle_tools.bench.gpu.machine import Machine
from eagle_tools.bench.gpu.packages import installed
from eagle_tools.bench.padding import LLAMA_8B, PaddedShape, pad_demo

CONTEXT = 2048  # of engines for many requests
CHUNK = 8192  # prompt rows per cycle
AS_SERVED = {"adaptive": True, "estimating": True}  # the server's default settings with drafts


@dataclass(frozen=True)
class Scale:
    """Sizes of the model, the batches and the measurements. For `model_steps` and the like see `TreeConfig`."""

    shape: PaddedShape
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    model_steps: int = 6
    topk: int = 8
    nodes: int = 64
    cycles: int = 24  # measured per run
    settling: int = 110  # cycles before, in which an adaptive budget learns: its first lessons, and some more
    clients: tuple[int, ...] = (1, 8, 32, 64)  # of a server
    mixed: tuple[int, ...] = (32, 128, 512, 768)  # lengths of prompts that clients send in turn
    served_tokens: int = 128  # of an answer to them
    prompts: int = 6  # one after the other at batch 1
    copied_bytes: int = 4 << 30
    uncached_bytes: int = 200 << 20  # of weights that are read in turn: more than a GPU's cache holds
    matmul: int = 8192
    peer_tokens: int = 64
    mla_heads: int = 128  # DeepSeek-V3's
    mla_rank: int = 512
    mla_rope: int = 64


FULL = Scale(shape=LLAMA_8B)
TINY = replace(
    FULL,
    shape=PaddedShape.tiny(),
    batches=(1, 2),
    contexts=(64, 128, 256),
    cycles=4,
    settling=8,
    clients=(1, 2),
    mixed=(16, 48),
    served_tokens=16,
    prompts=2,
    copied_bytes=16 << 20,
    uncached_bytes=1,
    matmul=256,
    peer_tokens=8,
    mla_heads=4,
    mla_rank=32,
    mla_rope=16,
)


@dataclass(frozen=True)
class Pair:
    """A target and its draft head."""

    target: TargetModel
    head: DraftHead


class BenchEngines:
    """The machine, and engines over one padded pair, which is made when first used.

    Tests replace the library `flashinfer` and the `recorder` of CUDA graphs by `stand_ins`.
    """

    def __init__(
        self,
        scale: Scale,
        device: torch.device,
        deadline: float = math.inf,
        stand_ins: Mapping[str, Any] | None = None,
    ) -> None:
        self.scale, self.device, self.stand_ins = scale, device, stand_ins or {}
        self._deadline = deadline
        self.machine = Machine(device)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.flashinfer = "flashinfer" in self.stand_ins or (device.type == "cuda" and installed("flashinfer"))

    @cached_property
    def pair(self) -> Pair:
        reach = max(CONTEXT, *self.scale.contexts) + 1024  # and the trees
        target, head = pad_demo(self.scale.shape, device=self.device, dtype=self.dtype, context=reach)
        return Pair(target, head)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The demo's held-out prompts as token ids."""
        texts = json.loads((DEMO / "prompts.json").read_text())
        if not installed("tokenizers"):
            return [[1 + (7 * i + j * j) % 4000 for j in range(48)] for i in range(len(texts))]
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
        return [tokenizer.encode(text).ids for text in texts]

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, which is a value of time.time()."""
        return self._deadline - time.time()

    def batch_of(self, size: int) -> list[list[int]]:
        """`size` different prompts."""
        count = len(self.prompts)
        return [self.prompts[i % count][i // count :] for i in range(size)]

    def text_of(self, length: int) -> list[int]:
        """`length` tokens: all prompts in a row, repeated."""
        tokens = [token for prompt in self.prompts for token in prompt]
        return (tokens * (length // len(tokens) + 1))[:length]

    def release(self) -> None:
        """Give back the device's memory that nothing uses, so that an engine or another process can."""
        gc.collect()
        if self.machine.cuda:
            torch.cuda.empty_cache()

    def make(self, *, speculative: bool, batches: Sequence[int] = (1,), **settings: Any) -> Engine:
        """A new engine over the shared weights, with the numbers of `config`."""
        pair = self.pair
        target = copy.copy(pair.target)  # each engine sets which residual streams its target returns
        config = self.config(speculative=speculative, batches=batches, **settings)
        return assemble(target, pair.head if speculative else None, config, Surroundings(**self.stand_ins))

    def config(self, *, speculative: bool, batches: Sequence[int] = (1,), **settings: Any) -> EngineConfig:
        """The configuration for these batch sizes, with CUDA graphs and FlashInfer if available.

        Trees are of one size, so that stages can be compared. With `AS_SERVED` they follow cost and load.
        """
        scale, largest = self.scale, max(batches)
        numbers: dict[str, Any] = {
            "context_length": CONTEXT,
            "max_total_tokens": CONTEXT + largest * 1024,
            "max_running_requests": largest,
            "chunked_prefill_size": CHUNK,
            "disable_radix_cache": True,
            "backend": "flashinfer" if self.flashinfer else "torch_native",
            "graph_sizes": tuple(batches) if self.flashinfer else (),
        }
        if speculative:
            numbers["tree"] = TreeConfig(scale.model_steps, scale.topk, scale.nodes)
        return EngineConfig(**{**numbers, **settings})
