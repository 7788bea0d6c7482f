"""Loads FlashInfer's modules that the tests and the parts need, so that none is compiled within the time budget."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from eagle_server.engine.assembly.backends import launch_kernel, load_kernels
from eagle_server.models.checkpoints.load_target import read_model_config
from eagle_server.models.config import MLAConfig, ModelConfig
from eagle_tools import DEMO
from eagle_tools.bench.gpu.engines import BenchEngines, Scale

DEEPSEEK_V3 = MLAConfig(1536, 512, 128, 64, 128, rope_interleaved=True)


def build(engines: BenchEngines) -> dict[str, Any]:
    """Seconds for the modules of each model. Without FlashInfer there are none."""
    launch_kernel(engines.device)
    if not engines.flashinfer:
        return {"seconds": {}}
    seconds = {}
    for name, model in models(engines.scale, engines.dtype).items():
        began = time.perf_counter()
        load_kernels(model, engines.device, engines.stand_ins.get("flashinfer"))
        seconds[name] = time.perf_counter() - began
    return {"seconds": seconds}


def models(scale: Scale, dtype: torch.dtype) -> dict[str, ModelConfig]:
    """The shapes that modules are compiled for. Tests need sliding windows, and as many KV heads as heads."""
    shape = scale.shape
    demo = replace(read_model_config(DEMO / "target"), head_dim=shape.head_dim, dtype=dtype)
    latent = replace(DEEPSEEK_V3, kv_lora_rank=scale.mla_rank, qk_rope_head_dim=scale.mla_rope)
    return {
        "the padded demo": replace(demo, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads),
        "sliding windows": replace(demo, num_heads=8, num_kv_heads=2, num_layers=2, windows=(0, 50)),
        "as many KV heads as heads": replace(demo, num_heads=4, num_kv_heads=4),
        "latent attention": replace(demo, num_heads=scale.mla_heads, mla=latent),
    }
