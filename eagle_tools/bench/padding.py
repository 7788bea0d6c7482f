"""Pads a small trained pair to the shape and cost of a large one. The logits, and so the acceptance, stay the same.

With h the narrow hidden size and H the wide one, each tensor is padded like this:

*Hidden size.* The first h channels of the residual stream are the narrow model's. The others are exactly 0, because the
weights that write to them are zero. mean(x^2) over H channels is h/H of that over h. So norms get eps * h/H, weights
times sqrt(h/H), and weight 0 on the new channels. The weights that read a norm may have any value there.

*Heads.* Query s of group g stays query s of group g; there are more groups, and more queries per group. With the same
RoPE base, pair (i, i + d/2) of a head of size d rotates as fast as pair (ri, ri + rd/2) of a head of size rd, so it
moves there. The attention scale is (rd)^-1/2 instead of d^-1/2, so query rows are multiplied by sqrt(r). New channels
of an old head have zero keys. The outputs of new heads and channels are multiplied by zero columns of o_proj.

*MLP width and layers.* The outputs of new units are multiplied by zero columns of down_proj. New layers have zero
o_proj and down_proj. They are at the end, so that layer boundaries keep their numbers.

*Vocabulary.* A new token must never be drawn, but there is no bias in lm_head. So channel h carries a constant: each
embedding row has c = 2^-30 there. The norms inside the layers have weight 0 on it; the final norm makes it 2^25 c /
rms. Rows of new tokens in lm_head have -2^25 there, rows of old tokens 0. So the logits of new tokens are -2^20 / rms
and a little noise. The constant costs no accuracy: c^2 vanishes in the float32 sums of squares, which include eps, and
powers of two are exact in bfloat16 (float16 cannot represent them). The head gets it through fc, which copies it from
the first stream to the head's own; feedback keeps it.

Weights that need not be zero are random, so that a GPU uses as much power as with a dense model. o_proj and down_proj,
a third of the weights, are zero except for a corner. In exact arithmetic both models are the same function. In float32
logits differ because sums are in another order. In bfloat16 the factor sqrt(r) also rounds the query weights, by no
more than activations are rounded.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import created_as, load_family_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.save import HasWeightViews, save_checkpoint
from eagle_server.models.config import ModelConfig
from eagle_server.models.config_json import read_config
from eagle_server.models.drafts.eagle3 import Eagle3Config, Eagle3Head
from eagle_server.models.drafts.interface import TargetWeights
from eagle_server.models.layers import pack_linears
from eagle_server.models.targets.decoder import TargetModel
from eagle_tools import DEMO

_CONSTANT = 2.0**-30  # channel h of the residual stream
_SHOW = 2.0**25  # the final norm's weight on it; with _REFUSE, the logit of a new token is -2^20 / rms
_REFUSE = -(2.0**25)
_STD = 0.02  # of the random weights; activations stay of order one
_SEED = 0

_NORMS = {"input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"}
_WRITERS = {"embed_tokens", "fc", "o_proj", "down_proj"}  # the weights that write to the residual stream


@dataclass(frozen=True)
class PaddedShape:
    """The shape to pad to. The head has one layer with the target's widths."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int

    @classmethod
    def tiny(cls) -> PaddedShape:
        """Slightly larger than the demo in every number, for tests on a CPU."""
        return cls(384, 18, 12, 4, 128, 1024, 4596, 2348)


LLAMA_8B = PaddedShape(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    draft_vocab_size=32000,
)


def pad_target(
    model: TargetModel, shape: PaddedShape, *, device: str | torch.device, dtype: torch.dtype, context: int
) -> TargetModel:
    """The same function in `shape`, on `device`, with a RoPE table for `context`. Logits of new ids are about -1e5.

    Raises:
        ValueError: `model` is not a plain Llama, or `shape` is smaller in some number.
    """
    config = _widened(model.config, shape, dtype)
    with created_as(dtype, device):
        wide = TargetModel(config, context)
    wide.requires_grad_(requires_grad=False).eval()
    _Widening(model.config, config, torch.Generator(device).manual_seed(_SEED)).fill(wide, model)
    pack_linears(wide)
    return wide


def pad_head(
    head: Eagle3Head,
    target: TargetModel,
    shape: PaddedShape,
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    context: int,
) -> Eagle3Head:
    """The same head for the padded `target`; new draft ids map to new target ids.

    Raises:
        ValueError: `head` is not a plain EAGLE-3 head, or `shape` is smaller in some number.
    """
    narrow = head.eagle
    layers = replace(_widened(head.config, shape, dtype), num_layers=head.config.num_layers)
    config = replace(
        narrow,
        layers=layers,
        target_hidden_size=shape.hidden_size,
        draft_vocab_size=shape.draft_vocab_size,
    )
    _check_head(narrow, config)
    with created_as(dtype, device):
        wide = Eagle3Head(config, context, TargetWeights(target.embed.detach(), target.lm_head))
    wide.requires_grad_(requires_grad=False).eval()
    _Widening(head.config, layers, torch.Generator(device).manual_seed(_SEED)).fill(wide, head)
    old = head.target_ids(torch.arange(narrow.draft_vocab_size, device=head.norm.weight.device)).to(device)
    new = torch.arange(config.draft_vocab_size - narrow.draft_vocab_size, device=device) + head.config.vocab_size
    wide.set_vocabulary(torch.cat([old, new]))
    pack_linears(wide)
    return wide


def pad_demo(
    shape: PaddedShape, *, device: str | torch.device, dtype: torch.dtype, context: int
) -> tuple[TargetModel, Eagle3Head]:
    """The embedded demo padded to `shape`."""
    target, head = load_demo(context)
    wide = pad_target(target, shape, device=device, dtype=dtype, context=context)
    return wide, pad_head(head, wide, shape, device=device, dtype=dtype, context=context)


def load_demo(context: int) -> tuple[TargetModel, Eagle3Head]:
    """The embedded demo without padding, in float32 on the CPU."""
    target = load_family_target(DEMO / "target", Loading(context=context, progress=False), dtype="float32")
    head = load_draft(DEMO / "eagle3", target, Loading(context=context, progress=False))
    assert isinstance(head, Eagle3Head)
    return target, head


def pad_checkpoint(
    directory: Path, shape: PaddedShape = LLAMA_8B, *, device: str | torch.device = "cpu", dtype: torch.dtype
) -> None:
    """Write the padded demo in the published formats: `directory`/target with its tokenizer, and `directory`/eagle3."""
    target, head = pad_demo(shape, device=device, dtype=dtype, context=1)  # RoPE tables are not written
    for name, model in (("target", target), ("eagle3", head)):
        published = {**read_config(DEMO / name), **_published_sizes(model.config), "tie_word_embeddings": False}
        if name == "eagle3":
            published |= {"draft_vocab_size": shape.draft_vocab_size, "target_hidden_size": shape.hidden_size}
            # At the top level these are boundaries for certain. Those in eagle_config may be layer outputs.
            published["eagle_aux_hidden_state_layer_ids"] = list(head.aux_boundaries)
        save_checkpoint(model, directory / name, published, dtype)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(DEMO / "target" / file, directory / "target" / file)


def _published_sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
    }


def _widened(narrow: ModelConfig, shape: PaddedShape, dtype: torch.dtype) -> ModelConfig:
    wide = replace(
        narrow,
        **{field: size for field, size in asdict(shape).items() if field != "draft_vocab_size"},
        rms_norm_eps=narrow.rms_norm_eps * narrow.hidden_size / shape.hidden_size,
        tie_word_embeddings=False,
        windows=(),
        dtype=dtype,
    )
    plain = replace(narrow, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False)
    rotates_alike = narrow.rope.kind in ("default", "linear", "llama3")  # the speed of pair i depends on i / d alone
    if narrow.architecture != "LlamaForCausalLM" or narrow != plain or any(narrow.windows) or not rotates_alike:
        raise ValueError(f"only a plain Llama can be padded, found {narrow}")
    sizes = ("num_layers", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    smaller = [name for name in sizes if getattr(wide, name) < getattr(narrow, name)]
    if smaller or wide.hidden_size <= narrow.hidden_size or _group(wide) < _group(narrow):
        raise ValueError(f"{shape}: every number must be at least, and hidden_size more than, that of {narrow}")
    if wide.head_dim % narrow.head_dim or wide.num_heads % wide.num_kv_heads:
        raise ValueError(f"{shape}: head_dim must be a multiple of {narrow.head_dim}, and num_heads of num_kv_heads")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{dtype} has no room for the constant channel; float32 or bfloat16 is expected")
    return wide


def _check_head(narrow: Eagle3Config, wide: Eagle3Config) -> None:
    plain = replace(
        narrow,
        norm_before_residual=False,
        feature_norm="none",
        norm_output=False,
        own_embed=False,
        own_lm_head=True,
        vocab_map=True,
    )
    if narrow != plain or not narrow.aux_boundaries or narrow.target_hidden_size != narrow.layers.hidden_size:
        raise ValueError(f"only a plain EAGLE-3 head with fc, lm_head and vocabulary map can be padded, found {narrow}")
    new_ids = wide.layers.vocab_size - narrow.layers.vocab_size
    if not 0 <= wide.draft_vocab_size - narrow.draft_vocab_size <= new_ids:
        size, least = wide.draft_vocab_size, narrow.draft_vocab_size
        raise ValueError(f"draft_vocab_size {size}: {least} are expected, and up to {new_ids} more")


@dataclass(frozen=True)
class _Widening:
    """Fills weights of the wide shape from the narrow shape's, by their published names."""

    narrow: ModelConfig
    wide: ModelConfig
    random: torch.Generator

    def fill(self, wide: HasWeightViews, narrow: HasWeightViews) -> None:
        """Fill every weight of `wide` in place. Only the narrow weights are copied between devices."""
        known = dict(narrow.weight_views())
        if self.narrow.tie_word_embeddings:
            known["lm_head.weight"] = known["model.embed_tokens.weight"]
        for name, weight in wide.weight_views():
            path, _, suffix = name.rpartition(".")
            if suffix == "weight":  # the caller sets the vocabulary map
                self._fill(path.rpartition(".")[2], weight, known.get(name))

    def _fill(self, kind: str, wide: Tensor, narrow: Tensor | None) -> None:
        """`kind` is q_proj, norm, embed_tokens ...; `narrow` is None in new layers."""
        if kind in _NORMS and narrow is None:
            narrow = torch.ones(self.narrow.hidden_size)
        if kind in _NORMS or kind in _WRITERS:
            wide.zero_()
        else:
            self._randomize(wide)
        if narrow is None:
            return
        if kind == "k_proj":
            wide[: self.narrow.num_kv_heads * self.wide.head_dim] = 0.0
        values = self._split(kind, narrow.detach() * self._factor(kind), self.narrow)
        _corner(self._split(kind, wide, self.wide), values).copy_(values)
        self._add_constant(kind, wide, len(narrow))

    def _randomize(self, weight: Tensor) -> None:
        weight.normal_(0.0, _STD, generator=self.random)

    def _factor(self, kind: str) -> float:
        if kind in _NORMS:
            return math.sqrt(self.narrow.hidden_size / self.wide.hidden_size)
        return math.sqrt(self.wide.head_dim / self.narrow.head_dim) if kind == "q_proj" else 1.0

    def _split(self, kind: str, weight: Tensor, config: ModelConfig) -> Tensor:
        """A view with one axis per dimension that is padded, so that the narrow weight is a corner of the wide one.

        Half a head has the axes (d / 2, r): channel i of the narrow head is channel ri of the wide head.
        """
        head = (2, self.narrow.head_dim // 2, config.head_dim // self.narrow.head_dim)
        queries, keys = (config.num_kv_heads, _group(config), *head), (config.num_kv_heads, *head)
        streams = (-1, config.hidden_size)  # an EAGLE-3 head's first layer reads two, its fc one per boundary
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        columns = {"q_proj": streams, "k_proj": streams, "v_proj": streams, "o_proj": queries, "fc": streams}
        if kind in columns:
            weight = weight.unflatten(1, columns[kind])
        if kind in rows:
            weight = weight.unflatten(0, rows[kind])
        return weight

    def _add_constant(self, kind: str, wide: Tensor, rows: int) -> None:
        """Set channel h, from the embedding to the logits. The first `rows` rows are the narrow model's."""
        channel = self.narrow.hidden_size
        match kind:
            case "embed_tokens":
                self._randomize(wide[rows:, :channel])
                wide[:, channel] = _CONSTANT
            case "fc":
                self._randomize(self._split(kind, wide, self.wide)[:, :, channel + 1 :])  # its inputs are zeros
                wide[channel, channel] = 1.0
            case "norm":
                wide[channel] = _SHOW
            case "lm_head":
                wide[:rows, channel] = 0.0
                wide[rows:, channel] = _REFUSE


def _group(config: ModelConfig) -> int:
    return config.num_heads // config.num_kv_heads


def _corner(wide: Tensor, narrow: Tensor) -> Tensor:
    return wide[tuple(slice(size) for size in narrow.shape)]


def main(argv: Sequence[str]) -> int:
    """Write the padded demo as two checkpoints."""
    shapes = {"llama-8b": LLAMA_8B, "tiny": PaddedShape.tiny()}
    parser = argparse.ArgumentParser(
        prog="python -m eagle_tools.bench.padding",
        description="Writes the embedded demo padded to another shape, as two checkpoints that any server can load: "
        "OUT/target and OUT/eagle3. They cost as much as a model of that shape, and need no download.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder; 18 GB of it at the shape of Llama-3.1-8B")
    parser.add_argument("--shape", choices=shapes, default="llama-8b", help="(llama-8b)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the weights are made (cpu)")
    arguments = parser.parse_args(argv)
    pad_checkpoint(arguments.out, shapes[arguments.shape], device=arguments.device, dtype=torch.bfloat16)
    print(f"written: {arguments.out / 'target'}, {arguments.out / 'eagle3'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
