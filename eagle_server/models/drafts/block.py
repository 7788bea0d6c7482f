"""Block drafters (DFlash and its relatives): one pass over a block of rows gives the scores of several next tokens.

The context is read from the target's features alone. L is its length, and the root stands at position L:

    c[p]   = hidden_norm(fc(cat(aux[p], low -> high)))                 the same for all layers, no shift
    K_l[p] = RoPE(k_norm_l(k_proj_l c[p]), p);  V_l[p] = v_proj_l c[p]  without input_layernorm
    x      = [e(root), e(mask), ..., e(mask)]                          rows at L, L + 1, ...
    layers as in Qwen3, whose rows see the context and each other;  y = norm(x);  scores = lm_head(y)

Fill-in: row j scores the token at its own position L + j, and row 0 none. Next-token: row j scores L + j + 1.

Source: DFlash (arXiv 2602.06036), z-lab/dflash, speculators, deepseek-ai/DeepSpec and JetSpec (arXiv 2606.18394).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_server.attention.interface import AttentionBackend, BoundAttention
from eagle_server.models.config import ModelConfig
from eagle_server.models.drafts.block_edges import Confidence, EdgeConfig, Edges, LocalConvolution, convolved
from eagle_server.models.drafts.interface import DraftModel, HeadConfig, TargetWeights
from eagle_server.models.layers import Attention, Linear, RMSNorm, Views
from eagle_server.models.native_layers import native_decoder
from eagle_server.models.rope import RotaryEmbedding
from eagle_server.models.targets.llama import llama_layer
from eagle_server.ops.layers.fused import rotate
from eagle_server.ops.native.decoder import NativeDecoder


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """Sizes and flags of a block drafter.

    layers: the decoder. Its vocab_size is the target's.
    aux_boundaries: the residual streams that `fc` takes.
    block_size: the rows that it was trained with, root included.
    next_token: the layout, see above.
    causal: of each layer, whether a row sees only the rows before it.
    embed_scale, logit_scale, logits_softcap: c > 0 replaces scaled logits by c * tanh(logits / c).
    vocab_map: whether d2t and t2d are part of the checkpoint.
    edges: what a token adds to the scores of the next one; None: nothing (DFlash).
    convolution: (taps, channels that share a dynamic kernel) of DFlash 2; None: there is none.
    confidence_rank: numbers of its parent's code that a row's confidence reads (DSpark); None: there is no confidence.
    """

    target_hidden_size: int
    draft_vocab_size: int
    aux_boundaries: tuple[int, ...]
    block_size: int
    mask_token_id: int
    causal: tuple[bool, ...]
    next_token: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logits_softcap: float = 0.0
    vocab_map: bool = False
    edges: EdgeConfig | None = None
    convolution: tuple[int, int] | None = None
    confidence_rank: int | None = None

    @property
    def num_drafts(self) -> int:
        """The most tokens that one pass drafts."""
        return self.block_size - (0 if self.next_token else 1)


@dataclass(frozen=True)
class BlockAttention:
    """Attention of the rows of a block: in causal layers, and in the others. None: there are none of that kind.

    Each is bound when its layers run, because a backend on a GPU has one bound forward at a time.
    """

    causal: Callable[[], BoundAttention] | None
    bidirectional: Callable[[], BoundAttention] | None
    rows: int  # of a block

    def bind(self, *, causal: bool) -> BoundAttention:
        bind = self.causal if causal else self.bidirectional
        assert bind is not None, "the head has layers of this kind"
        return bind()


class BlockHead(DraftModel):
    """Weights shared with the target are not registered, so they are not trained or saved."""

    algorithm = "DFLASH"

    def __init__(self, config: BlockConfig, context: int, target: TargetWeights) -> None:
        super().__init__()
        self.block, self.config = config, config.layers
        self.aux_boundaries, self.max_steps = config.aux_boundaries, config.num_drafts
        self._target = target
        layers, hidden = config.layers, config.layers.hidden_size
        self.embed = nn.Parameter(torch.empty(layers.vocab_size, hidden)) if config.own_embed else None
        self.fc = Linear(len(config.aux_boundaries) * config.target_hidden_size, [("fc", hidden)])
        self.hidden_norm = RMSNorm(hidden, layers.rms_norm_eps)
        self.layers = nn.ModuleList(llama_layer(layers, index) for index in range(layers.num_layers))
        self.norm = RMSNorm(hidden, layers.rms_norm_eps)
        self.lm_head = Linear(hidden, [("lm_head", config.draft_vocab_size)]) if config.own_lm_head else None
        self.rope = RotaryEmbedding(layers.rope, layers.head_dim, context)
        edges, vocab = config.edges, layers.vocab_size
        self.edges = None if edges is None else Edges(edges, hidden, vocab, config.draft_vocab_size, target)
        rank = config.confidence_rank
        self.confidence = None if rank is None else Confidence(hidden, rank)
        taps = config.convolution
        count = 0 if taps is None else layers.num_layers
        self.attention_convs = nn.ModuleList(LocalConvolution(hidden, *(taps or (1, 1))) for _ in range(count))
        self.mlp_convs = nn.ModuleList(LocalConvolution(hidden, *(taps or (1, 1))) for _ in range(count))
        mapped = config.vocab_map
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if mapped else None
        self.register_buffer("d2t", offsets, persistent=mapped)
        used = torch.zeros(layers.vocab_size, dtype=torch.bool) if mapped else None
        self.register_buffer("t2d", used, persistent=mapped)
        self.mask_embedding: Tensor | None  # [H], in the place of the mask token's
        self.register_buffer("mask_embedding", None, persistent=False)
        self.mask_ids: Tensor  # the draft id of the mask token, int64 [1]; [0] if it is not in a reduced vocabulary
        masks = [] if mapped else [config.mask_token_id]
        self.register_buffer("mask_ids", torch.tensor(masks, dtype=torch.int64), persistent=False)
        self._inverse: Tensor | None = None  # int64 [V], draft ids by target ids
        self._native: list[NativeDecoder] = []  # of each stretch; []: native kernels do not compute them
        self._native_context: NativeDecoder | None = None  # writes the context's KV

    @property
    def kv(self) -> ModelConfig:
        return self.config

    @property
    def first_draft(self) -> int:
        """The first row that scores a token."""
        return 0 if self.block.next_token else 1

    @property
    def vocab_size(self) -> int:
        return self.block.draft_vocab_size

    @property
    def why_no_token_map(self) -> str | None:
        return None if self.d2t is None else f"this drafter has {self.vocab_size} tokens of its own (d2t)"

    def keep_rows(self, token_map: Tensor) -> None:
        self.lm_head = self._draft_head().with_rows(token_map)
        self.mask_ids = (token_map == self.block.mask_token_id).nonzero()[:, 0]
        if self.edges is not None:
            self.edges.keep_rows(token_map)

    def fuse(self) -> None:
        """See `Fusable`."""
        self._native_context = native_decoder(self.layers, self.hidden_norm, self.rope)
        natives = list[NativeDecoder]()
        for _, numbers in self._stretches():
            layers = [self.layers[i] for i in numbers]
            pairs = [(self.attention_convs[i], self.mlp_convs[i]) for i in numbers] if self.attention_convs else []
            around = [(a.native_weights(), m.native_weights()) for a, m in pairs]  # type: ignore[operator]
            norm = self.norm if numbers[-1] == len(self.layers) - 1 else None
            lacks = any(None in each for each in around)
            native = None if lacks else native_decoder(layers, norm, self.rope, convolutions=around)
            if native is None:
                return
            natives.append(native)
        self._native = natives

    def _stretches(self) -> Iterator[tuple[bool, list[int]]]:
        """The layers in stretches of one kind: whether they are causal, and their numbers."""
        for causal, group in groupby(range(len(self.layers)), key=lambda number: self.block.causal[number]):
            yield causal, list(group)

    def write_context(self, features: Tensor, positions: Tensor, slots: Tensor, attention: AttentionBackend) -> None:
        """Write the context's keys and values to the pool of `attention`.

        features [rows, n * Ht], positions and slots int64 [rows].
        """
        pool, caches = attention.pool, attention.native_caches
        if self._native_context is not None and self.fc.native is not None and caches is not None:
            self._native_context.write_context(features, self.fc.native, positions, slots, caches)
            return
        for index, k, v in self.context_kv(features, positions):
            dtype = pool.keys[index].dtype
            pool.write(index, slots, k.to(dtype), v.to(dtype))

    def context_kv(self, features: Tensor, positions: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of each layer its index in the pool, and the context's keys and values [rows, kv_heads, head_dim]."""
        context = self.hidden_norm(self.fc(features))
        cos, sin = self.rope.angles(positions, context.dtype)
        for layer in self.layers:
            attention: Attention = layer.attention  # type: ignore[assignment]
            written = attention.qkv.outputs_from(context, attention.heads * attention.head_dim)
            k, v = written.unflatten(1, (2, attention.kv_heads, attention.head_dim)).unbind(1)
            k = rotate(k if attention.k_norm is None else attention.k_norm(k), cos, sin)
            yield attention.spec.index, k, v

    def rows(self, roots: Tensor, positions: Tensor, attention: BlockAttention) -> Tensor:
        """y [bs, rows, H] of blocks with roots int64 [bs], whose rows stand at positions int64 [bs, rows]."""
        x, where = self._embedded(roots, positions.shape[1]).flatten(0, 1), positions.reshape(-1)
        y: Tensor = self._through_layers(x, where, attention).unflatten(0, positions.shape)
        return y

    def _through_layers(self, x: Tensor, positions: Tensor, attention: BlockAttention) -> Tensor:
        """x [rows, H] -> norm(the last residual stream)."""
        stretches = list(self._stretches())
        bounds = [attention.bind(causal=causal) for causal, _ in stretches] if self._native else []
        if bounds and all(bound.native_rows is not None for bound in bounds):
            normed = x
            for bound, native in zip(bounds, self._native, strict=True):
                at_once = bound.decode(native, x, None, positions)
                assert at_once is not None
                normed, x, _ = at_once
            return normed
        if self.attention_convs:
            return self._through_convolved_layers(x, positions, attention)
        rope = self.rope(positions, x.dtype)
        residual: Tensor | None = None
        for causal, numbers in stretches:
            bound = attention.bind(causal=causal)
            for number in numbers:
                x, residual = self.layers[number](x, residual, rope, bound)
        assert residual is not None
        return self.norm.after_add(x, residual)[0]

    def _through_convolved_layers(self, x: Tensor, positions: Tensor, attention: BlockAttention) -> Tensor:
        """`_through_layers` layer by layer, with the convolutions of DFlash 2 around each sublayer."""
        rope, rows = self.rope(positions, x.dtype), attention.rows
        kinds = zip(self.block.causal, self.layers, self.attention_convs, self.mlp_convs, strict=True)
        bound, bound_causal = None, None
        for causal, layer, attention_conv, mlp_conv in kinds:
            if causal != bound_causal:
                bound, bound_causal = attention.bind(causal=causal), causal
            normed = layer.input_norm(x)  # type: ignore[operator]
            before, after = attention_conv.kernels(normed)  # type: ignore[operator]
            mixed = layer.attention(convolved(before, normed, rows), rope, bound)  # type: ignore[operator]
            x = x + convolved(after, mixed, rows)
            normed = layer.post_norm(x)  # type: ignore[operator]
            before, after = mlp_conv.kernels(normed)  # type: ignore[operator]
            x = x + convolved(after, layer.mlp(convolved(before, normed, rows)), rows)  # type: ignore[operator]
        return self.norm(x)  # type: ignore[no-any-return]

    def _embedded(self, roots: Tensor, rows: int) -> Tensor:
        """[bs, rows, H]: the root, then masks."""
        table = self._target.embed if self.embed is None else self.embed
        mask = table[self.block.mask_token_id] if self.mask_embedding is None else self.mask_embedding
        first = F.embedding(roots, table)[:, None]
        masks = mask.to(first.dtype).expand(len(roots), rows - 1, -1)
        x = torch.cat([first, masks], dim=1)
        return x if self.block.embed_scale == 1.0 else x * x.new_tensor(self.block.embed_scale)

    def logits(self, y: Tensor) -> Tensor:
        """[rows, H] -> [rows, draft vocabulary]. The mask token is no draft."""
        logits: Tensor = self._draft_head()(y)
        if self.block.logit_scale != 1.0:
            logits = logits * self.block.logit_scale
        if self.block.logits_softcap:
            logits = self.block.logits_softcap * torch.tanh(logits / self.block.logits_softcap)
        return logits.index_fill_(1, self.mask_ids, float("-inf"))

    def _draft_head(self) -> Linear:
        return self._target.lm_head if self.lm_head is None else self.lm_head

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids, any shape -> target ids, int64. `d2t` holds offsets."""
        ids = super().target_ids(draft_ids)
        return ids if self.d2t is None else ids + self.d2t[ids]

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """The inverse of `target_ids`, for ids that the head drafts."""
        if self.d2t is None and self.token_map is None:
            return target_ids
        if self._inverse is None:
            places = torch.arange(self.draft_vocab_size, device=target_ids.device)
            unknown = places.new_zeros(self.config.vocab_size)
            self._inverse = unknown.index_copy(0, self.target_ids(places), places)
        return self._inverse[target_ids]

    def edge(
        self, y: Tensor, parents: Tensor, tokens: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A selector's `edges` over candidates by target ids, int64 [bs, 1 or nodes, C]; None: others, over all."""
        assert self.edges is not None
        if tokens is None:
            return self.edges.to_all(y, parents, state)
        added: tuple[Tensor, Tensor | None] = self.edges(y, parents, self.draft_ids(tokens), state)
        return added

    def confidence_logits(self, y: Tensor, parents: Tensor) -> Tensor:
        """The logits of a row's confidence below each parent, float32 [bs, nodes], from y [bs, H].

        Trained and kept, but no tree follows it: docs/experiments.md, "confidence as a factor of scores".
        """
        assert self.confidence is not None
        codes = None if self.edges is None else self.edges.before
        confidence: Tensor = self.confidence(y, parents, codes)
        return confidence

    def weight_views(self) -> Views:
        """Every published name with its view of a parameter."""
        if self.embed is not None:
            yield "embed_tokens.weight", self.embed
        yield from self.fc.weight_views("")
        yield "hidden_norm.weight", self.hidden_norm.weight
        for index, layer in enumerate(self.layers):
            yield from layer.weight_views(f"layers.{index}.")  # type: ignore[operator]
        for name, convs in (("attention", self.attention_convs), ("mlp", self.mlp_convs)):
            for index, conv in enumerate(convs):
                yield from conv.weight_views(f"layers.{index}.{name}_conv.")  # type: ignore[operator]
        if self.edges is not None:
            yield from self.edges.weight_views()
        if self.confidence is not None:
            yield from self.confidence.weight_views()
        yield "norm.weight", self.norm.weight
        if self.lm_head is not None:
            yield from self.lm_head.weight_views("")
        if self.d2t is not None and self.t2d is not None:
            yield "d2t", self.d2t
            yield "t2d", self.t2d
