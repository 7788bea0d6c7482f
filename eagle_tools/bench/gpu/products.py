"""The matrix products of a layer and the lm_head, with weights in bfloat16, fp8 and int4, for a few numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_server.ops.linear.packed import PackedWeight, pack_weight, packed_linear, why_not_computed
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.ops.linear.rounded import RoundedWeight
from eagle_tools.bench.gpu.engines import BenchEngines
from eagle_tools.bench.gpu.machine import Machine, brief, is_fatal

ROWS = (1, 16, 64, 512)
FORMATS: tuple[Quantization, ...] = ("fp8", "int4")
Product = Callable[[Tensor], Tensor]


def products(engines: BenchEngines) -> dict[str, Any]:
    """Microseconds of each product by format. "fp8, rounded inputs": by `_scaled_mm`, with the rounding of its rows."""
    shape, rows = engines.scale.shape, list[dict[str, Any]]()
    attended = shape.num_heads * shape.head_dim
    sizes = {
        "qkv": (attended + 2 * shape.num_kv_heads * shape.head_dim, shape.hidden_size),
        "o": (shape.hidden_size, attended),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "lm_head": (shape.vocab_size // 16 * 16, shape.hidden_size),
    }
    for name, (outputs, inputs) in sizes.items():
        weight = torch.randn(outputs, inputs, device=engines.device).to(engines.dtype) / inputs**0.5
        found = _by_format(weight, engines.scale.uncached_bytes)
        for count in ROWS:
            x = torch.randn(count, inputs, device=engines.device).to(engines.dtype)
            row: dict[str, Any] = {"product": name, "outputs": outputs, "inputs": inputs, "rows": count}
            for form, copies in found.items():
                try:
                    row[form] = 1e6 * _seconds(engines.machine, copies, x)
                except (RuntimeError, ValueError) as error:
                    if is_fatal(error):
                        raise
                    row[form] = brief(error)
            rows.append(row)
        del weight, found
        engines.release()
    return {"rows": rows}


def _by_format(weight: Tensor, size: int) -> dict[str, list[Product]]:
    """Products with copies of the weight, of about `size` bytes together."""
    count = max(1, size // weight.nbytes)
    plain = [weight, *(weight.clone() for _ in range(count - 1))]
    found: dict[str, list[Product]] = {
        "bfloat16" if weight.is_cuda else "plain": [partial(_plain, own) for own in plain]
    }
    for form in FORMATS:
        if why_not_computed(form, weight.device, weight.dtype) is None:
            packed = [pack_weight(weight, form) for _ in range(count * (2 if form == "fp8" else 4))]
            found[form] = [partial(_packed, own) for own in packed]
            rounded = [own.rounded for own in packed if isinstance(own.rounded, RoundedWeight)]
            if form == "fp8":
                found["fp8, rounded inputs"] = [own.multiply_rounded for own in rounded]
    return found


def _plain(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight)


def _packed(weight: PackedWeight, x: Tensor) -> Tensor:
    return packed_linear(x, weight, None)


def _seconds(machine: Machine, copies: Sequence[Product], x: Tensor) -> float:
    """Of one product. On a GPU all copies are one CUDA graph, so that launches take no time of the host."""

    def run() -> None:
        for product in copies:
            product(x)

    if not machine.cuda:
        return machine.seconds(run, repeats=1, warm_ups=0) / len(copies)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return machine.seconds(graph.replay) / len(copies)
