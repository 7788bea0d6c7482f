"""NEXTN heads draft what transformers' `MtpModel` drafts, for each family that has MTP layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from eagle_server.attention.dense import DenseCausal
from eagle_server.attention.interface import LayerSpec
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.drafts.mtp import MtpHead
from tests.parity.checkpoints import CASES, VOCAB, write
from tests.parity.test_target_parity import DenseWindows
from tests.support import mimo_v2, step3p5
from tests.support.engines import CONTEXT, MARGIN, plain, request, run, speculative, tokens_of

# Published names: of a decoder layer's parts, and of what an MTP layer has beside them.
NAMES = {
    "deepseek": ("model.layers.{layer}.", {"post_norm": "model.layers.{layer}.shared_head.norm"}),
    "qwen": (
        "mtp.layers.{number}.",
        {
            "eh_proj": "mtp.fc",
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "post_norm": "mtp.norm",
        },
    ),
    "mimo": (
        "model.mtp_layers.{number}.",
        {
            "eh_proj": "model.mtp_layers.{number}.input_proj",
            "enorm": "model.mtp_layers.{number}.token_layernorm",
            "hnorm": "model.mtp_layers.{number}.hidden_layernorm",
            "post_norm": "model.mtp_layers.{number}.final_layernorm",
        },
    ),
}
STEPS = 4


def mtp_of(model: PreTrainedModel, layers: int = 1) -> MtpModel:
    """Random MTP layers for transformers' model."""
    model.config.num_mtp_layers, model.config.mtp_layer_types = layers, ["full_attention"] * layers
    model.config.mtp_mlp_layer_types = ["sparse"] * layers
    torch.manual_seed(4)
    mtp = MtpModel(model, layers).eval()
    with torch.no_grad():
        for name, parameter in mtp.layers.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if "norm" in name else 0.15)
    mtp.set_experts_implementation("eager")
    return mtp


def save_beside(mtp: MtpModel, directory: Path, names: str = "deepseek") -> None:
    """Add the layers to the target's file, under published names."""
    path, (block, others) = directory / "model.safetensors", NAMES[names]
    raw, layers = json.loads((directory / "config.json").read_text()), dict[str, Tensor]()
    first = raw.get("text_config", raw)["num_hidden_layers"]
    for number, layer in enumerate(mtp.layers):
        where = {"number": number, "layer": first + number}
        prefix = block.format(**where)
        for name, tensor in layer.state_dict().items():
            part, _, rest = name.partition(".")
            if name.endswith("experts.gate_up_proj"):
                gate, up = tensor.chunk(2, dim=1)
                for kind, weights in (("gate_proj", gate), ("up_proj", up)):
                    layers |= {f"{prefix}mlp.experts.{i}.{kind}.weight": weight for i, weight in enumerate(weights)}
            elif name.endswith("experts.down_proj"):
                layers |= {f"{prefix}mlp.experts.{i}.down_proj.weight": weight for i, weight in enumerate(tensor)}
            elif part == "mtp_block":
                layers[f"{prefix}{rest}"] = tensor
            elif part in others:
                layers[f"{others[part].format(**where)}.{rest}"] = tensor
            else:
                layers[f"{prefix}{name}"] = tensor
    save_file({**load_file(path), **{name: tensor.clone() for name, tensor in layers.items()}}, path)
    count = 0 if names == "qwen" else len(mtp.layers)
    (directory / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": count}))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("glm4-moe", "deepseek"),
        ("glm4-moe-groups-quarter-rotated", "deepseek"),
        ("glm4-moe-lite", "deepseek"),
        ("deepseek-v3", "deepseek"),
        ("qwen3-moe", "qwen"),
        ("qwen3.5", "qwen"),
        ("qwen3.5-moe", "qwen"),
        ("qwen3-next", "qwen"),
        ("mimo", "mimo"),
    ],
)
def test_a_greedy_chain_is_transformers(case: str, names: str, tmp_path: Path) -> None:
    """Each step reads the target's hidden states of the text, then the layer's own."""
    theirs = write(CASES[case], tmp_path)
    mtp = mtp_of(theirs)
    mtp.layers[0].config.mtp_hidden_states_first = names == "mimo"
    save_beside(mtp, tmp_path, names)
    check_greedy_chain(tmp_path, theirs, mtp)


@torch.inference_mode()
def check_greedy_chain(directory: Path, theirs: PreTrainedModel, mtp: Any) -> None:
    """The chain that is drafted with the layer in this checkpoint is the one that transformers drafts."""
    target = load_target(directory, Loading(progress=False), dtype="float32")
    head = load_draft(directory, target, Loading(context=64, progress=False), target_path=directory)
    assert isinstance(head, MtpHead) and head.mtp.index == target.config.num_layers
    text = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(3))
    hidden = theirs.model(text[None]).last_hidden_state[0]
    first = theirs.lm_head(hidden[-1]).argmax()[None]
    tokens, mine, their_hidden = torch.cat([text[1:], first]), hidden, hidden
    for _ in range(STEPS):
        positions = torch.arange(len(tokens))
        out = head(tokens, mine, positions, DenseCausal(1))
        row = mtp.forward_layer(0, their_hidden[None], positions[None], None, input_ids=tokens[None])[0]
        logits = theirs.lm_head(row)
        torch.testing.assert_close(head.logits(out.normed), logits, atol=2e-4, rtol=1e-4)
        tokens = torch.cat([tokens, logits[-1].argmax()[None]])
        mine, their_hidden = torch.cat([mine, out.feedback[-1:]]), torch.cat([their_hidden, row[-1:]])


def check_texts(directory: Path) -> None:
    """Texts with the layer's drafts are those without."""
    how = Loading(context=CONTEXT, lookahead=MARGIN, progress=False)
    target = load_target(directory, how, dtype="float32")
    engine = speculative(target, load_draft(directory, target, how, target_path=directory), page_size=2)  # type: ignore[arg-type]
    requests = [request(i, range(1 + i, 20), max_tokens=16, temperature=0.7 * i, ignore_eos=True) for i in range(3)]
    assert tokens_of(run(engine, requests)) == tokens_of(run(plain(target), requests))
    assert engine.stats().drafted_tokens > 0


class _LongcatMtp(torch.nn.Module):
    """LongCat's MTP layer of transformers' modules, under its published names below model.mtp."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config, first = model.config, model.model.layers[0]
        attention, mlp = type(first.self_attn[0]), type(first.mlps[0])

        def norm() -> torch.nn.Module:
            return type(first.input_layernorm[0])(config.hidden_size, eps=config.rms_norm_eps)  # type: ignore[no-any-return]

        self.rotary, self.embed_tokens = [model.model.rotary_emb], model.model.embed_tokens
        layer, wrapped = torch.nn.Module(), [torch.nn.Module() for _ in range(3)]
        layer.enorm, layer.hnorm, layer.transformer_layer = wrapped
        layer.enorm.m, layer.hnorm.m = norm(), norm()
        layer.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
        layer.self_attn, layer.transformer_layer.mlp = attention(config, 0), mlp(config)
        self.layers, self.norm = torch.nn.ModuleList([layer]), norm()

    def forward_layer(
        self, _: int, hidden: Tensor, positions: Tensor, __: None, input_ids: Tensor
    ) -> tuple[Tensor, ...]:
        layer: Any = self.layers[0]
        joined = [layer.enorm.m(self.embed_tokens(input_ids)), layer.hnorm.m(hidden)]
        x = layer.eh_proj(torch.cat(joined, dim=-1))
        rows = x.shape[1]
        mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
        rope = self.rotary[0](x, positions)
        x = x + layer.self_attn(layer.input_layernorm(x), attention_mask=mask, position_embeddings=rope)[0]
        x = x + layer.transformer_layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)  # type: ignore[no-any-return]


@torch.inference_mode()
@pytest.mark.parametrize("has_copy", [True, False])
def test_longcats_layer_drafts_what_its_modules_draft(tmp_path: Path, has_copy: bool) -> None:
    theirs = write(CASES["longcat-flash"], tmp_path)
    mtp = _LongcatMtp(theirs).eval()
    torch.manual_seed(4)
    for name, parameter in mtp.named_parameters():
        if name != "embed_tokens.weight":
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if "norm" in name else 0.15)
    file = tmp_path / "model.safetensors"
    layers = {f"model.mtp.{name}": tensor.clone() for name, tensor in mtp.state_dict().items()}
    if not has_copy:
        del layers["model.mtp.embed_tokens.weight"]
    save_file({**load_file(file), **layers}, file)
    check_greedy_chain(tmp_path, theirs, mtp)
    check_texts(tmp_path)


class _NemotronMtp(torch.nn.Module):
    """Nemotron-H's MTP layer of transformers' modules, under its published names below mtp, but for the experts."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config, block, kinds = model.config, type(model.model.layers[0]), model.config.layers_block_type
        self.embed = [model.model.embeddings]
        self.layers = torch.nn.ModuleList(block(config, kinds.index(kind)) for kind in ("full_attention", "moe"))
        first, last = cast(Any, self.layers[0]), cast(Any, self.layers[-1])
        first.enorm, first.hnorm, last.final_layernorm = (type(first.norm)(config.hidden_size) for _ in range(3))
        for norm in (first.enorm, first.hnorm, last.final_layernorm):
            norm.variance_epsilon = config.layer_norm_epsilon
        first.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward_layer(self, _: int, hidden: Tensor, __: Tensor, ___: None, input_ids: Tensor) -> Any:
        first, last = cast(Any, self.layers[0]), cast(Any, self.layers[-1])
        x = first.eh_proj(torch.cat([first.enorm(self.embed[0](input_ids)), first.hnorm(hidden)], dim=-1))
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        return last.final_layernorm(last(first(x, attention_mask=mask)))

    def published(self) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, tensor in self.state_dict().items():
            part = name.rpartition(".")[2]
            if ".experts." in name and part in ("up_proj", "down_proj"):
                found |= {f"mtp.{name.rpartition('.')[0]}.{i}.{part}.weight": each for i, each in enumerate(tensor)}
            else:
                found[f"mtp.{name}"] = tensor
        return {name: tensor.clone() for name, tensor in found.items()}


@torch.inference_mode()
@pytest.mark.parametrize("case", ["nemotron-h-experts", "nemotron-h-narrow-experts-biases"])
def test_nemotrons_layer_drafts_what_its_modules_draft(tmp_path: Path, case: str) -> None:
    theirs = write(CASES[case], tmp_path)
    mtp = _NemotronMtp(theirs).eval()
    torch.manual_seed(4)
    for name, parameter in mtp.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if "norm" in name else 0.15)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), **mtp.published()}, file)
    check_greedy_chain(tmp_path, theirs, mtp)
    check_texts(tmp_path)


class _LayersRows(DenseCausal):
    """Layer k does not see the first k rows, which transformers does not have."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        own = (x[layer.index :] for x in (q, k, v))
        return torch.cat([q.new_zeros(layer.index, *q.shape[1:2], v.shape[2]), super().run(*own, layer)])


@torch.inference_mode()
@pytest.mark.parametrize("case", ["glm4-moe", "deepseek-v3"])
def test_pass_k_is_transformers_layer_k(case: str, tmp_path: Path) -> None:
    """Every row of every layer over the text, and over the nodes of a greedy chain. Levels below use the last layer."""
    layers, theirs = 3, write(CASES[case], tmp_path)
    mtp = mtp_of(theirs, layers)
    save_beside(mtp, tmp_path)
    target = load_target(tmp_path, Loading(progress=False), dtype="float32")
    head = load_draft(tmp_path, target, Loading(context=64, progress=False), target_path=tmp_path)
    assert isinstance(head, MtpHead) and head.num_layers == layers and len(head.kv.pool_layers) == layers
    text = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(3))
    hidden = theirs.model(text[None]).last_hidden_state[0]
    tokens, attention = torch.cat([text[1:], theirs.lm_head(hidden[-1]).argmax()[None]]), _LayersRows(1)

    def shifted(z: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(z[:1]), z])

    out = head.extend(tokens, hidden, torch.arange(len(tokens)), attention, lambda _, z: shifted(z)[:-1])
    expected, read = list[Tensor](), hidden
    for layer in range(layers):  # row i of layer k reads token i + k + 1 and what layer k - 1 gave in row i
        positions = torch.arange(layer, layer + len(read))
        rows = mtp.forward_layer(layer, read[None], positions[None], None, input_ids=tokens[None, layer:])[0]
        torch.testing.assert_close(out.feedback.chunk(layers, 1)[layer][layer:], rows, atol=2e-4, rtol=1e-4)
        expected.append(rows)
        read = rows[:-1]
    for level in range(1, layers):
        row = theirs.lm_head(expected[level - 1])[-1]
        torch.testing.assert_close(head.logits(out.normed)[-1], row, atol=2e-4, rtol=1e-4)
        tokens, before = torch.cat([tokens, row.argmax()[None]]), out.feedback
        out = head.step(level, tokens, shifted(before), torch.arange(len(tokens)), attention)
        for layer in range(level, layers):
            read = expected[layer - 1][: len(tokens) - layer]
            positions = torch.arange(layer, layer + len(read))
            rows = mtp.forward_layer(layer, read[None], positions[None], None, input_ids=tokens[None, layer:])[0]
            torch.testing.assert_close(out.feedback.chunk(layers, 1)[layer][layer:], rows, atol=2e-4, rtol=1e-4)
            expected[layer] = rows
    token, where = tokens[-1:], (torch.zeros(1, dtype=torch.int64), DenseCausal(1))
    below = head.step(layers, token, out.feedback[-1:], *where)
    own, _ = head.layers[-1](head.embedded(token), out.normed[-1:], *where)
    torch.testing.assert_close(below.normed, own, atol=0, rtol=0)


@torch.inference_mode()
def test_every_layer_of_mimo_v2_reads_the_targets_stream(tmp_path: Path) -> None:
    """A chain: pass k is layer k over the tokens k places further, and the target's streams before its last norm."""
    theirs, mtp = mimo_v2.write_with_mtp(tmp_path)
    target = load_target(tmp_path, Loading(progress=False), dtype="float32")
    head = load_draft(tmp_path, target, Loading(context=64, progress=False), target_path=tmp_path)
    assert isinstance(head, MtpHead) and head.num_layers == mimo_v2.LAYERS
    assert head.aux_boundaries == (target.config.num_layers,)
    text, streams = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(3)), list[Tensor]()
    hook = theirs.model.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0][0]))
    first = theirs(text[None]).logits[0, -1].argmax()[None]
    hook.remove()
    features = target(text, torch.arange(20), DenseWindows(1, 20), head.aux_boundaries).aux
    assert features is not None
    torch.testing.assert_close(features, streams[0], atol=2e-4, rtol=1e-4)

    def shifted(z: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(z[:1]), z])

    tokens = torch.cat([text[1:], first])
    out = head.extend(tokens, features, torch.arange(20), _WindowedRows(1, 20), lambda _, z: shifted(z)[:-1])
    for level in range(mimo_v2.LAYERS):
        expected = mtp.logits(level, tokens[level:], features)
        torch.testing.assert_close(head.logits(out.normed)[level:], expected, atol=2e-4, rtol=1e-4)
        tokens = torch.cat([tokens, expected[-1].argmax()[None]])
        if level < mimo_v2.LAYERS - 1:
            rows = len(tokens)
            out = head.step(level + 1, tokens, shifted(out.feedback), torch.arange(rows), _WindowedRows(1, rows))


@torch.inference_mode()
def test_every_layer_of_step_reads_the_stream_of_the_one_before(tmp_path: Path) -> None:
    """A chain of transformers' layers, which get residual streams: pass k is layer k over row i + k's token."""
    theirs, mtp = step3p5.write_with_mtp(tmp_path)
    target = load_target(tmp_path, Loading(progress=False), dtype="float32")
    head = load_draft(tmp_path, target, Loading(context=64, progress=False), target_path=tmp_path)
    layers = step3p5.LAYERS
    assert isinstance(head, MtpHead) and head.num_layers == layers
    assert head.aux_boundaries == (target.config.num_layers,)
    norms = [layer.post_norm for layer in mtp.layers]
    for layer in mtp.layers:
        layer.use_post_norm = False
    text, streams = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(3)), list[Tensor]()
    hook = theirs.model.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0][0]))
    first = theirs(text[None]).logits[0, -1].argmax()[None]
    hook.remove()
    features = target(text, torch.arange(20), DenseWindows(1, 20), head.aux_boundaries).aux
    assert features is not None
    torch.testing.assert_close(features, streams[0], atol=2e-4, rtol=1e-4)

    def shifted(z: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(z[:1]), z])

    def expected(number: int, read: Tensor) -> Tensor:
        """The stream of layer `number`, whose row i reads token i + number."""
        positions, own = torch.arange(number, number + len(read)), tokens[None, number : number + len(read)]
        return mtp.forward_layer(number, read[None], positions[None], None, input_ids=own)[0]

    tokens = torch.cat([text[1:], first])
    out = head.extend(tokens, features, torch.arange(20), _WindowedRows(1, 20), lambda _, z: shifted(z)[:-1])
    read = features
    for level in range(layers):
        stream = expected(level, read)
        logits = theirs.lm_head(norms[level](stream))
        torch.testing.assert_close(head.logits(out.normed)[level:], logits, atol=5e-4, rtol=1e-4)
        tokens, read = torch.cat([tokens, logits[-1].argmax()[None]]), stream
        if level < layers - 1:
            rows = len(tokens)
            out = head.step(level + 1, tokens, shifted(out.feedback), torch.arange(rows), _WindowedRows(1, rows))


class _WindowedRows(DenseWindows):
    """`_LayersRows` with windows."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
        own = DenseWindows(1, len(q) - layer.index).run(*(x[layer.index :] for x in (q, k, v)), layer)
        return torch.cat([q.new_zeros(layer.index, *q.shape[1:2], v.shape[2]), own])
