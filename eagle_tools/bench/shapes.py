"""python -m eagle_tools.bench.shapes: layers in the sizes of published models, by native kernels and by transformers.

Layers with random weights, all experts included, without embedding and lm_head. A step is one row, as in plain
decoding, or the rows of a verified tree (of transformers' code: of a chain). With recurrent layers the native step also
moves the states along an accepted path. The bytes that a step must read are the weights of all layers but experts,
those of the experts that its rows chose, and the states. Steps of every kind, and a loop that only reads memory, are
timed in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_server.attention.interface import AttentionBatch, BoundAttention, Causal, Layout, TreeMask
from eagle_server.attention.recurrent import TreeRows
from eagle_server.attention.torch_native import torch_native
from eagle_server.cache.pool import pool_of
from eagle_server.engine.assembly.pools import make_states
from eagle_server.models.checkpoints.load_target import created_as
from eagle_server.models.layers import Linear, pack_linears
from eagle_server.models.mla import MLAAttention
from eagle_server.models.moe import ExpertLinear, MixtureOfExperts
from eagle_server.models.targets.decoder import TargetModel
from eagle_server.models.targets.registry import read_target_config
from eagle_server.ops.linear.quantize import Quantization, QuantizedWeight
from eagle_server.ops.native.library import set_threads
from eagle_server.speculation.tree import Tree
from eagle_tools.bench.report import write_json
from eagle_tools.bench.rich_output import Console, Table

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 0,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    },
    "granite-4.0-h-1b": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "shared_intermediate_size": 4096,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "layer_types": ["full_attention" if layer % 10 == 5 else "linear_attention" for layer in range(40)],  # noqa: PLR2004
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
}
LAYERS = {"qwen3-30b-a3b": 3, "glm-4.5-air": 2, "qwen3.5-0.8b": 24, "gpt-oss-20b": 2}  # that fit memory twice
LAYERS |= {"granite-4.0-h-1b": 40, "lfm2-1.2b": 16, "deepseek-v2-lite": 3}
MX_BLOCK = 32  # inputs that share a scale in MXFP4
PREFIX, VOCAB = 128, 4096  # tokens before a step, and tokens that rows are drawn from
EXPERTS = ("grouped_mm", "batched_mm", "eager")  # transformers' ways to compute experts; the first is its default
READ = 100_000_000  # words of memory that are only read
PAUSE = 0.01  # seconds after each step, in which torch's threads fall asleep: they would take the kernels' cores
Step = Callable[[Tensor], Any]  # the tokens of its rows


@dataclass
class ShapeRow:
    """The median seconds of one step, and for native kernels the bytes that it must read."""

    name: str
    rows: int
    seconds: float
    must_read: float | None


def decoder(
    shape: str, layers: int, dtype: torch.dtype, quantization: Quantization | None, *, mxfp4: bool = False
) -> TargetModel:
    """The native model, packed, with random weights. mxfp4: the format of the experts' weights."""
    raw = {**SHAPES[shape], "num_hidden_layers": layers, "vocab_size": VOCAB, "max_position_embeddings": 1024}
    config = read_target_config(raw, shape)
    with created_as(dtype, "cpu"):
        model = TargetModel(config, 1024).requires_grad_(requires_grad=False).eval()
    for module in model.modules():
        if mxfp4 and isinstance(module, ExpertLinear):
            module.pack(codes=_random_mxfp4(*module.weight.shape))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.fill_(1.0 if parameter.dtype == dtype else 0.0)
    model.embed.normal_()
    pack_linears(model, quantization, progress=True)
    return model


def _random_mxfp4(outputs: int, inputs: int) -> QuantizedWeight:
    blocks = -(-inputs // MX_BLOCK)
    codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
    scales, zeros = torch.full((blocks, outputs), 2.0**-8), torch.zeros(blocks, outputs, dtype=torch.uint8)
    return QuantizedWeight("mxfp4", codes, scales, zeros, MX_BLOCK)


def native_step(model: TargetModel, rows: int) -> tuple[Step, Callable[[Tensor], float]]:
    """A step of `rows` rows after the prefix, the nodes of a tree, and the bytes that it must read."""
    config = model.config
    slots = PREFIX + rows + 1
    pool = pool_of(config.pool_layers, slots, config.dtype, torch.device("cpu"))
    for cached in (*pool.keys, *pool.values):
        cached.normal_()
    attention, requests = torch_native(pool), torch.tensor([0])
    parents = (torch.arange(rows)[None] - 1) // 2  # two children of each node
    depth = rows.bit_length() - 1
    tree = Tree.linked(torch.zeros_like(parents), parents, torch.tensor([PREFIX]), depth)
    mask = Causal() if rows == 1 else TreeMask(tree.mask, tree.depths, tree.depths)
    layout = Layout((rows,), (PREFIX + rows,), None if rows == 1 else rows)
    table = torch.arange(1, slots, dtype=torch.int32)[None]
    states = make_states(config, 1, rows, torch.device("cpu"))
    if states is not None:
        states.states.zero_()
        states.rings.zero_()
    batch = AttentionBatch(
        *(requests, torch.tensor([PREFIX + rows]), table, table[0, PREFIX:].long(), mask, layout),
        recurrent=None if states is None else TreeRows(states, tree, requests),
    )
    positions = tree.positions[0]
    path = (2 ** torch.arange(depth + 1) - 1)[None]  # the first child of each node

    def bound() -> BoundAttention:
        return attention.plan(layout).bind(batch)

    def step(tokens: Tensor) -> None:
        if states is not None:
            states.keep(path, requests)
        model(tokens, positions, bound())

    read = 0 if states is None else states.states[:, 0].nbytes
    return step, lambda tokens: read + _must_read(model, tokens, positions, bound())


def _must_read(model: TargetModel, tokens: Tensor, positions: Tensor, bound: BoundAttention) -> float:
    """Bytes that the layers must read. They run one by one, so their routers tell which experts the rows chose."""
    experts = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    read = [0.0]

    def count(module: MixtureOfExperts, inputs: tuple[Tensor, ...]) -> None:
        chosen = module.router(inputs[0])[0].unique().numel()
        part = chosen / module.router.config.experts
        read[0] += part * (module.experts.gate_up.nbytes + module.experts.down.nbytes)

    hooks = [module.register_forward_pre_hook(count) for module in experts]
    x, residual = model.embed[tokens], None
    for layer in model.layers if experts else ():
        x, residual = layer(x, residual, model.rope(positions, x.dtype), bound)
    for hook in hooks:
        hook.remove()
    routed = {linear for module in experts for linear in module.experts.modules()}
    linears = (module for module in model.layers.modules() if isinstance(module, Linear) and module not in routed)
    latents = (module.kv_b for module in model.modules() if isinstance(module, MLAAttention))
    return read[0] + sum(linear.nbytes for linear in linears) + sum(weight.nbytes for weight in latents)


def transformers_model(shape: str, layers: int, dtype: torch.dtype) -> Any:
    """The same model by transformers' code."""
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds of import

    raw = {key: value for key, value in SHAPES[shape].items() if key not in ("architectures", "model_type")}
    config = AutoConfig.for_model(
        SHAPES[shape]["model_type"], **raw, num_hidden_layers=layers, vocab_size=VOCAB, pad_token_id=None
    )
    with created_as(dtype, "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    model.get_input_embeddings().weight.data.normal_()
    return model


def transformers_step(model: Any, experts: str, rows: int) -> Step:
    """A step with its KV cache. `experts`: which of transformers' ways to compute them."""
    from transformers import DynamicCache

    if experts:
        model.set_experts_implementation(EXPERTS[0])  # another one would copy the weights of every row's experts
    cache = DynamicCache(config=model.config)
    model.model(torch.randint(VOCAB, (1, PREFIX)), cache=cache)
    positions = PREFIX + torch.arange(rows)[None]
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    crops = kinds == {"full_attention"}  # other layers cannot go back to before a step

    def step(tokens: Tensor) -> None:
        if experts:
            model.set_experts_implementation(experts)
        model.model(tokens[None], cache=cache, position_ids=positions)
        if crops:
            cache.crop(-rows)

    return step


def read_rate(memory: Tensor) -> float:
    """Bytes per second that the threads read when they only add up."""
    began = time.perf_counter()
    memory.sum()
    return memory.nbytes / (time.perf_counter() - began)


def interleaved(
    steps: Mapping[tuple[str, int], Step], tokens: Mapping[int, Tensor], memory: Tensor
) -> tuple[dict[tuple[str, int], list[float]], list[float]]:
    """The seconds of every step, one of each kind after the other, and read rates. The first of each only warms up."""
    seconds, rates = {kind: list[float]() for kind in steps}, list[float]()
    for number in range(len(next(iter(tokens.values())))):
        for kind, step in steps.items():
            began = time.perf_counter()
            step(tokens[kind[1]][number])
            if number:
                seconds[kind].append(time.perf_counter() - began)
            time.sleep(PAUSE)
        rates.append(read_rate(memory))
        time.sleep(PAUSE)
    return seconds, rates


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_tools.bench.shapes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-30b-a3b", help="whose sizes (qwen3-30b-a3b)")
    parser.add_argument("--layers", type=int, default=None, help="how many (as many as fit 20 GB twice)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the weights (bfloat16)"
    )
    parser.add_argument("--quantization", choices=("int8", "int4"), default=None, help="of the native weights (none)")
    parser.add_argument("--mxfp4", action="store_true", help="native experts in four-bit floats, as gpt-oss has them")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="rows of a step (1 16)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each kind (20)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads (2)")
    parser.add_argument("--experts", nargs="+", choices=EXPERTS, default=EXPERTS, help="transformers' (all three)")
    parser.add_argument("--without-transformers", action="store_true", help="time the native kernels alone")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the numbers")
    arguments = parser.parse_args(argv)
    dtype, layers = getattr(torch, arguments.dtype), arguments.layers or LAYERS[arguments.shape]
    generator = torch.Generator().manual_seed(0)
    tokens = {rows: torch.randint(VOCAB, (arguments.steps + 1, rows), generator=generator) for rows in arguments.rows}
    memory = torch.ones(READ, dtype=torch.int64)
    set_threads(arguments.threads, fused=False)
    model = decoder(arguments.shape, layers, dtype, arguments.quantization, mxfp4=arguments.mxfp4)
    steps: dict[tuple[str, int], Step] = {}
    must_read: dict[tuple[str, int], float] = {}
    for rows in arguments.rows:
        steps["native", rows], reads = native_step(model, rows)
        must_read["native", rows] = statistics.mean(reads(step_tokens) for step_tokens in tokens[rows][1:])
    if not arguments.without_transformers:
        theirs = transformers_model(arguments.shape, layers, dtype)
        for rows in arguments.rows:
            for experts in arguments.experts if model.config.moe is not None else ("",):
                name = f"transformers, {experts}" if experts else "transformers"
                steps[name, rows] = transformers_step(theirs, experts, rows)
    seconds, rates = interleaved(steps, tokens, memory)
    measured = [ShapeRow(*kind, statistics.median(times), must_read.get(kind)) for kind, times in seconds.items()]
    rate = statistics.median(rates)
    weights = f"{arguments.quantization or arguments.dtype}{', MXFP4 experts' * arguments.mxfp4}"
    Console().print(_table(measured, rate, f"{layers} layers of {arguments.shape}, {weights}"))
    if arguments.out is not None:
        numbers = [vars(row) for row in measured]
        write_json(arguments.out, vars(arguments), {"rows": numbers, "read_rate": rate})
    return 0


def _table(rows: Sequence[ShapeRow], rate: float, title: str) -> Table:
    table = Table("", "rows", "ms", "of native", "must read, MB", "GB/s", "of memory's", title=title)
    native = {row.rows: row.seconds for row in rows if row.name == "native"}
    for row in rows:
        reads = ["", "", ""]
        if row.must_read is not None:
            speed = row.must_read / row.seconds
            reads = [f"{row.must_read / 1e6:.0f}", f"{speed / 1e9:.1f}", f"{speed / rate:.2f}"]
        table.add_row(
            row.name, str(row.rows), f"{1e3 * row.seconds:.1f}", f"{row.seconds / native[row.rows]:.1f} x", *reads
        )
    table.caption = f"memory is read at {rate / 1e9:.1f} GB/s"
    return table


if __name__ == "__main__":
    sys.exit(main())
