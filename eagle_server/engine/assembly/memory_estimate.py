"""`--dry-run`: the memory that a configuration needs, read from config.json and the headers of the weight files."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eagle_server.algorithms import Algorithm
from eagle_server.config import Config
from eagle_server.engine.assembly.devices import (
    GPU_MEMORY,
    as_served,
    graph_memory,
    graph_sizes,
    memory_for_kv,
    resolve_backend,
    resolve_device,
    rounding_of_draft,
)
from eagle_server.engine.assembly.from_config import with_own_drafts
from eagle_server.engine.assembly.pools import bytes_per_slot, state_bytes
from eagle_server.engine.assembly.resolve import checkpoint_plan, context_length, dynamic_tree, lookahead_bound
from eagle_server.machine import usable_memory
from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles
from eagle_server.models.checkpoints.drafts.draft_loading import format_of
from eagle_server.models.checkpoints.drafts.load_draft import detect, draft_files
from eagle_server.models.checkpoints.load_target import read_model_config
from eagle_server.models.checkpoints.quantized import read_quantization, with_dequantized
from eagle_server.models.checkpoints.rank_slices import share_of
from eagle_server.models.checkpoints.weights import QuantizedTensor, open_weights, without_drafts
from eagle_server.models.config import ModelConfig
from eagle_server.models.config_json import read_config
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.ops.native.library import available
from eagle_server.speculation.tree_config import TreeConfig

_BITS = {"int8": 8.0, "fp8": 8.0, "int4": 4.4, "mxfp4": 4.25}  # per weight, with scales, and zeros of groups of 128
_SYSTEM = 2 << 30  # bytes of a CPU machine's memory that weights and KV should leave free


def as_far_as_known(config: Config) -> Config:
    """`config` with the drafts that the target's files decide, if these are on this machine."""
    return with_own_drafts(config) if _is_here(config.target_path) else config


def memory_estimate(config: Config) -> dict[str, Any]:
    """Bytes by part, how many tokens of KV fit, and whether a request of the full context does.

    With several ranks these are the numbers of rank 0, which also holds the draft and the vocabulary that it may share.

    Nothing is downloaded: checkpoints that are not here have `unknown` instead, with the reason.

    Raises:
        ValueError: the checkpoint or the device is not supported.
    """
    missing = [path for path in (config.target_path, config.draft_path) if path is not None and not _is_here(path)]
    if missing:
        return {"unknown": f"{' and '.join(missing)} must be on this machine; a start downloads what is on the Hub"}
    device = resolve_device(config)
    target = as_served(config, device, read_model_config(Path(config.target_path).expanduser()))
    dtype = target.dtype
    graphs, tree = 0, dynamic_tree(config.speculative, target) if config.speculates else TreeConfig()
    if device.type == "cuda":
        sizes = graph_sizes(config, resolve_backend(config, device, target))
        adaptive = config.speculates and config.speculative.adapts
        graphs = graph_memory(sizes, tree, target, streams=most_streams(config, target), adaptive=adaptive)
    ranks, draft = config.device.tp_size, 0
    native = config.device.cpu_kernels != "torch" and available(device, dtype)
    if config.draft_path not in (None, config.target_path):  # the target's files may hold its draft
        draft = weight_bytes(config.draft_path, dtype, rounding_of_draft(config, device, dtype), native=native)
    if config.draft_path is not None and ranks > 1:
        draft += 2 * target.vocab_size * target.hidden_size * dtype.itemsize
    layers = None if config.draft_path == config.target_path else target.num_layers
    weights = weight_bytes(config.target_path, dtype, config.model.quantization, layers, native=native)
    parts = {
        "target_weights": weights // ranks,
        "draft_weights": draft,
        "graphs": graphs,
    }
    share = share_of(target, ranks)
    if target.recurrent is not None:
        parts["states"] = state_bytes(share, config.scheduler.max_running_requests, tree.nodes)
    slot = bytes_per_slot(share) + _draft_bytes_per_slot(config, target)
    memory = _memory(config, device)
    left = memory - sum(parts.values())
    if device.type == "cpu":
        left = min(left, memory_for_kv(config, device) - parts.get("states", 0))
    saving = checkpoint_plan(config, share, slot)
    tokens = max(0, left // slot) if saving is None else saving.slots_that_fit(left - saving.least, slot)
    needed = context_length(config, target) + lookahead_bound(config, target)
    return {
        "device": str(device),
        "memory": memory,
        **parts,
        **({} if saving is None else {"state_checkpoints": saving.size * saving.count(tokens)}),
        "kv_per_token": slot,
        "kv_tokens_that_fit": tokens,
        "kv_tokens_of_a_full_context": needed,
        "fits": tokens >= needed,
    }


def given_tree(config: Config) -> dict[str, int]:
    """The options of the tree that is drafted; {} for static trees, or if the files that decide are not here.

    Raises:
        ValueError: the checkpoint is not supported, or no tree has the given options.
    """
    section = config.speculative
    if not config.speculates or section.token_tree is not None or not _is_here(config.target_path):
        return {}
    row = _draft_row(config)
    if row is not None and row.own_tree is not None:
        return {}
    if row is None and section.algorithm is None:
        return {}
    target = read_model_config(Path(config.target_path).expanduser())
    return asdict(section.tree_options(target.architecture))


def weight_bytes(
    path: str,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    layers: int | None = None,
    *,
    native: bool,
) -> int:
    """About how many bytes the weights of a checkpoint take when they are served.

    `layers`: how many layers the target has. Draft heads after them are not loaded. None: all is loaded. `native`:
    whether the native kernels compute.
    """
    directory = Path(path).expanduser()
    raw, source = _config_of(directory), str(directory / "config.json")
    stored, quantized = with_dequantized(open_weights(directory), raw, source), read_quantization(raw, source)
    stored = stored if layers is None else without_drafts(stored, layers)
    plain, bits = 8.0 * dtype.itemsize, 0.0
    for name, tensor in stored.items():
        weight_bits = plain
        if isinstance(tensor, QuantizedTensor) and quantized is None:
            weight_bits = tensor.bits or plain if native and "embed" not in name else plain
        elif isinstance(tensor, QuantizedTensor) and quantized is not None:
            weight_bits = _BITS.get(quantized.method) or (_BITS["int4"] if quantized.bits == 4 else 8.0)  # noqa: PLR2004
            if quantized.method == "mxfp4" and not native:
                weight_bits = plain  # it is multiplied out
        elif quantization is not None and len(tensor.shape) == 2 and "embed" not in name:  # noqa: PLR2004
            weight_bits = max(_BITS[quantization], 8.0 if name.startswith("lm_head") else 0.0)
        bits += weight_bits * math.prod(tensor.shape)
    return int(bits / 8)


def refusal(config: Config, estimate: dict[str, Any]) -> str | None:
    """Why the device cannot serve this, and what would help; None: it can, or this is unknown."""
    if estimate.get("fits", True):
        return None
    weights = sum(estimate[part] for part in ("target_weights", "draft_weights", "graphs"))
    gib = {name: f"{size / 2**30:.1f} GiB" for name, size in (("weights", weights), ("memory", estimate["memory"]))}
    if weights > estimate["memory"]:
        smaller = "a smaller model" if config.model.quantization else "--quantization, or a smaller model"
        return f"the weights take {gib['weights']}, and there are {gib['memory']}: {smaller}"
    return (
        f"beside the weights ({gib['weights']} of {gib['memory']}) there is room for {estimate['kv_tokens_that_fit']} "
        f"tokens of KV, and a request of the full context needs {estimate['kv_tokens_of_a_full_context']}: "
        "a smaller --context-length, or --quantization"
        f"{', or a smaller --max-running-requests' if 'states' in estimate else ''}"
    )


def _memory(config: Config, device: torch.device) -> int:
    if device.type == "cpu":
        return max(0, usable_memory() - _SYSTEM) // config.device.tp_size
    share = config.device.mem_fraction_static or GPU_MEMORY
    return int(torch.cuda.get_device_properties(device).total_memory * share)


def _draft_bytes_per_slot(config: Config, target: ModelConfig) -> int:
    """Bytes of a draft's KV per slot, of the layers that its loader reads."""
    row, files = _draft_row(config), _files_of_draft(config, target)
    layers = None if row is None or files is None else format_of(row).kv_config(files, target)
    return 0 if layers is None else bytes_per_slot(layers)


def most_streams(config: Config, target: ModelConfig) -> int:
    """The most residual streams of the target that a node's feature may have: those that the draft's fc takes at once.

    The fc of an EAGLE-1/2 head takes the feature beside an embedding, and counts as one stream more.
    """
    files = _files_of_draft(config, target)
    return 0 if files is None else files.matrix("fc.weight")[1] // target.hidden_size


def _files_of_draft(config: Config, target: ModelConfig) -> DraftFiles | None:
    """The draft's files; None: nothing is read from files."""
    if config.draft_path is None or _draft_row(config) is None:
        return None
    overrides = {**(config.speculative.draft_config_override or {}), "vocab_size": target.vocab_size}  # but for padding
    return draft_files(config.draft_path, config.target_path, overrides)


def _draft_row(config: Config) -> Algorithm | None:
    """The kind of draft, by its option or by its files; None: its files are not here."""
    if config.draft_path is None or config.speculative.head_algorithm is not None:
        return config.speculative.drafts
    if not _is_here(config.draft_path):
        return None
    return detect(draft_files(config.draft_path, config.target_path if _is_here(config.target_path) else None))


def _config_of(directory: Path) -> dict[str, Any]:
    """The values of config.json; {} if there is none."""
    return read_config(directory) if (directory / "config.json").is_file() else {}


def _is_here(path: str) -> bool:
    return Path(path).expanduser().is_dir()
