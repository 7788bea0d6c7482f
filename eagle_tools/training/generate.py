"""Text sampled from the target. A head drafts what the target writes, so it is trained on that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from eagle_server.attention.interface import BoundAttention, LayerSpec
from eagle_server.models.targets.decoder import TargetModel


class GrowingCausal(BoundAttention):
    """A `BoundAttention` of `batch` sequences that grow together: first a prompt, then one row per call."""

    def __init__(self, batch: int, capacity: int) -> None:
        self.batch, self.capacity = batch, capacity
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: k, v [batch, kv_heads, capacity, *]
        self._length: dict[int, int] = {}

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        """q, k [batch * new, heads or kv_heads, head_dim], v [.., kv_heads, value_dim] -> [.., heads, value_dim].

        new = 1 after the first call.
        """
        q4, k4, v4 = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))
        start, new = self._length.get(layer.index, 0), k4.shape[2]
        if start and new != 1:
            raise ValueError(f"one row per sequence is expected after the prompt, found {new}")
        if layer.sliding_window:
            raise ValueError("sliding-window layers are not supported here")
        keys, values = self._room(layer.index, k4, v4)
        keys[:, :, start : start + new], values[:, :, start : start + new] = k4, v4
        self._length[layer.index] = start + new
        if start == 0:
            out = F.scaled_dot_product_attention(q4, k4, v4, is_causal=True, scale=layer.scale, enable_gqa=True)
            return out.transpose(1, 2).reshape(*q.shape[:2], v.shape[2])
        grouped = q4.reshape(self.batch, keys.shape[1], -1, q4.shape[-1])  # the heads of a group as rows
        seen = slice(0, start + 1)
        out = F.scaled_dot_product_attention(grouped, keys[:, :, seen], values[:, :, seen], scale=layer.scale)
        return out.reshape(*q.shape[:2], v.shape[2])

    def _room(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self._stored:
            rows = (*k.shape[:2], self.capacity)
            self._stored[index] = (k.new_empty(*rows, k.shape[3]), v.new_empty(*rows, v.shape[3]))
        return self._stored[index]


@torch.no_grad()
def continue_texts(
    target: TargetModel, prompts: Tensor, new_tokens: int, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """Prompts [batch, length] with `new_tokens` sampled after each at its temperature [batch]; 0 is greedy."""
    batch, length = prompts.shape
    attention = GrowingCausal(batch, length + new_tokens)
    tokens, positions = prompts.reshape(-1), torch.arange(length, device=prompts.device).repeat(batch)
    written = [prompts]
    for place in range(length, length + new_tokens):
        hidden = target(tokens, positions, attention).hidden.unflatten(0, (batch, -1))[:, -1]
        logits = target.logits(hidden).float()
        gumbel = -torch.empty_like(logits).exponential_(generator=generator).log()
        tokens = (logits + temperatures[:, None] * gumbel).argmax(-1)
        positions = torch.full_like(tokens, place)
        written.append(tokens[:, None])
    return torch.cat(written, dim=1)


@dataclass(frozen=True)
class TextSampling:
    """How texts are sampled: their length, the range of prompt lengths, and the temperatures, used in turn."""

    length: int = 257
    prompt: tuple[int, int] = (24, 128)
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    batch: int = 256


def target_texts(target: TargetModel, stream: np.ndarray, texts: int, sampling: TextSampling, seed: int) -> np.ndarray:
    """Texts [texts, length]: each starts with a piece of `stream`, and the target continues it."""
    if not texts:
        return np.empty((0, sampling.length), stream.dtype)
    device = target.embed.device
    chooser, generator = np.random.default_rng(seed), torch.Generator(device).manual_seed(seed)
    batch = min(texts, sampling.batch)
    temperatures = torch.tensor(sampling.temperatures, device=device)[torch.arange(batch) % len(sampling.temperatures)]
    rounds = []
    for _ in tqdm(range(-(-texts // batch)), desc="sample the target", unit="batch"):
        prompt = int(chooser.integers(sampling.prompt[0], sampling.prompt[1] + 1))
        starts = chooser.integers(0, len(stream) - prompt, batch)
        prompts = torch.from_numpy(np.stack([stream[s : s + prompt] for s in starts]).astype(np.int64)).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            written = continue_texts(target, prompts, sampling.length - prompt, temperatures, generator)
        rounds.append(written.cpu().numpy().astype(stream.dtype))
    return np.concatenate(rounds)[:texts]
