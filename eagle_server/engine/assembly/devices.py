"""From the device options to concrete values: device, attention backend, CUDA graphs, memory for KV, threads."""

from __future__ import annotations

import importlib.util
import logging
import time
from dataclasses import replace
from pathlib import Path

import torch

from eagle_server.attention.batches import MIXED_CHUNKS, MIXED_ROWS
from eagle_server.attention.flashinfer.modules import HEAD_DIMS, MissingModuleError, warn_of_another_toolkit
from eagle_server.cache.pool import KVShape
from eagle_server.config import Config, ConfigError
from eagle_server.engine.assembly import backends
from eagle_server.engine.engine_config import Backend
from eagle_server.machine import usable_cores, usable_memory
from eagle_server.models.checkpoints.load_target import serving_dtype
from eagle_server.models.config import ModelConfig
from eagle_server.ops.linear.packed import why_not_computed
from eagle_server.ops.linear.quantize import Quantization
from eagle_server.ops.native.library import available
from eagle_server.ops.triton_support import NoCompilerError
from eagle_server.speculation.tree_config import TreeConfig, extend_widths
from eagle_server.worker.graphs import bucket_sizes

SMALL_MODEL = 50_000_000  # parameters; a smaller target is small
SMALL_MODEL_THREADS = 2
CPU_MEMORY_FOR_KV = 0.25  # share of the machine's memory, for both pools together
GPU_MEMORY = 0.85  # share of the GPU's memory, for weights and KV together
LARGEST_GRAPH = 64
_DEVICE_NODES = Path("/dev")  # has a file of the driver for each GPU

logger = logging.getLogger(__name__)


def resolve_device(config: Config, rank: int = 0) -> torch.device:
    """The device of the models; auto: the first NVIDIA GPU, if there is one; rank r has GPU r.

    Raises:
        ConfigError: more GPUs were asked for than torch sees, or this machine has one that torch cannot use.
    """
    wanted, has_cuda = config.device.device, torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError(f"--device cuda: torch cannot use an NVIDIA GPU: {_why_no_gpu()} (docs/gpu.md)")
    if wanted == "auto" and not has_cuda and (nodes := sorted(_DEVICE_NODES.glob("nvidia[0-9]*"))):
        raise ConfigError(
            f"{nodes[0]} is an NVIDIA GPU, but torch cannot use it: {_why_no_gpu()}; docs/gpu.md has a table of "
            "drivers and builds of torch, and --device cpu serves without the GPU"
        )
    device = torch.device("cuda", rank) if has_cuda and wanted != "cpu" else torch.device("cpu")
    if device.type == "cuda" and torch.cuda.device_count() < config.device.tp_size:
        raise ConfigError(f"--tp-size {config.device.tp_size}: torch sees {torch.cuda.device_count()} GPUs")
    if device.type == "cpu":
        config.device.refuse_gpu_options("torch sees none")
    elif config.device.cpu_kernels != "auto":
        raise ConfigError("--cpu-kernels has an effect on a CPU only: drop it, or add --device cpu")
    return device


def _why_no_gpu() -> str:
    """torch's error message, in one line."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # AssertionError: a build without CUDA
        return str(error).strip().partition("\n")[0].rstrip(".")
    return "torch.cuda.is_available() is false"


def load_kernels_early(config: Config, device: torch.device, model: ModelConfig) -> None:
    """Load the kernels of `model`, the target as it is served, before its weights, or say what is missing.

    This leaves out models that transformers' code runs: it is unknown yet whether they need FlashInfer.

    Raises:
        ConfigError: the backend cannot run.
    """
    if device.type == "cpu":
        return
    try:
        backends.launch_kernel(device)
    except NoCompilerError as error:
        raise ConfigError(str(error)) from error
    if model.has_family and resolve_backend(config, device, model) == "flashinfer":
        logger.info("FlashInfer's kernels: those that are not prebuilt are compiled, once, which takes minutes")
        warn_of_another_toolkit()
        began = time.perf_counter()
        load_kernels(device, model)
        logger.info("FlashInfer's kernels: %.1f s", time.perf_counter() - began)


def as_served(config: Config, device: torch.device, checkpoint: ModelConfig) -> ModelConfig:
    """A checkpoint's config in the dtype to serve. Logs it, if `auto` is not the checkpoint's.

    auto: the checkpoint's; on a GPU bfloat16 instead of float32, if FlashInfer and with it CUDA graphs can then be
    used. A demo of 8 M parameters took 22 ms per cycle on an H100 without them (docs/gpu.md).

    Raises:
        ConfigError: flashinfer was requested, and it cannot run.
    """
    model = replace(checkpoint, dtype=serving_dtype(config.model.dtype, checkpoint.dtype))
    if device.type == "cpu" or config.model.dtype != "auto" or model.dtype != torch.float32:
        return model
    if config.device.attention_backend == "auto" and not _has_flashinfer():
        logger.warning(
            "float32 and torch_native, without CUDA graphs: FlashInfer is not installed; with it "
            "(pip install 'eagle-server[cuda]') this model is served in bfloat16, which is faster"
        )
        return model
    narrow = replace(model, dtype=torch.bfloat16)
    if resolve_backend(config, device, narrow) == "torch_native":
        return model
    logger.info(
        "bfloat16 instead of the checkpoint's float32, which FlashInfer lacks; --dtype float32 is exact, and slower"
    )
    return narrow


def _has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def load_kernels(device: torch.device, *models: ModelConfig) -> None:
    """Load FlashInfer's kernels for these models.

    Raises:
        ConfigError: a module can be neither loaded nor compiled; the message says what to install.
    """
    for model in models:
        try:
            backends.load_kernels(model, device)
        except MissingModuleError as error:
            raise ConfigError(f"{error}; or choose --attention-backend torch_native, which is slower") from error


def rounding_of_draft(config: Config, device: torch.device, dtype: torch.dtype) -> Quantization | None:
    """How the draft's weights are rounded while they are loaded; None: they are not.

    On a CPU a head in int8 takes half the time and drafts as well: a chain of 5 is 1.1 to 1.2 times as fast with it.

    Raises:
        ConfigError: no kernels compute so here.
    """
    asked = config.speculative.draft_quantization
    if asked == "auto":
        natively = config.device.cpu_kernels != "torch" and available(device, dtype)
        return config.model.quantization or ("int8" if natively else None)
    if asked != "none" and (unable := why_not_computed(asked, device, dtype)) is not None:
        raise ConfigError(f"--speculative-draft-quantization {asked}: {unable}")
    return None if asked == "none" else asked


def resolve_backend(config: Config, device: torch.device, model: ModelConfig, *, capped: bool = False) -> Backend:
    """The attention backend for a target; auto: flashinfer if it can run. `capped`: scores are capped.

    Raises:
        ConfigError: flashinfer was requested, or the GPU needs it, and it cannot run.
    """
    wanted = config.device.attention_backend
    sixteen_bit = model.dtype in (torch.bfloat16, torch.float16)
    if wanted == "torch_native" or device.type == "cpu" or (wanted == "auto" and not sixteen_bit):
        return "torch_native"
    sizes = {shape.head_dim for shape in model.pool_layers if isinstance(shape, KVShape)}
    others = sorted(sizes.difference(HEAD_DIMS))
    for applies, lack in (
        (capped, "does not cap attention scores, which this model does"),
        (bool(others), f"has no kernels for heads of {', '.join(map(str, others))}"),
    ):
        if applies and wanted == "auto":
            logger.info("torch_native is used: the flashinfer backend %s", lack)
            return "torch_native"
        if applies:
            raise ConfigError(f"--attention-backend flashinfer {lack}: drop it, or choose torch_native")
    if not sixteen_bit:
        raise ConfigError("--attention-backend flashinfer takes no float32: add --dtype bfloat16, or drop it")
    if not _has_flashinfer():
        raise ConfigError(
            "a GPU needs FlashInfer, which is not installed: pip install 'eagle-server[cuda]', "
            "or --attention-backend torch_native, which is slower"
        )
    return "flashinfer"


def graph_sizes(config: Config, backend: Backend, *models: ModelConfig) -> tuple[int, ...]:
    """Batch sizes to capture CUDA graphs for.

    There are none for torch_native, because its tensor shapes follow the lengths, and none with several ranks, because
    capturing NCCL is not tested. There are none if one of the `models` runs by transformers' code that waits for the
    device, which cannot be captured.

    Raises:
        ConfigError: a size was given, but there are no graphs.
    """
    if backend == "torch_native" or config.device.disable_cuda_graph or config.device.tp_size > 1:
        return ()
    for model in models:
        if model.waits and config.device.cuda_graph_max_bs is not None:
            raise ConfigError(
                f"--cuda-graph-max-bs: {model.architecture} is not captured, because transformers' code waits for the "
                f"device in it ({model.waits}); drop it"
            )
        if model.waits:
            logger.info(
                "no CUDA graphs: transformers' code of %s waits for the device (%s)", model.architecture, model.waits
            )
            return ()
    running = config.scheduler.max_running_requests
    return bucket_sizes(min(running, config.device.cuda_graph_max_bs or LARGEST_GRAPH))


def graph_memory(sizes: tuple[int, ...], tree: TreeConfig, model: ModelConfig, *, streams: int, adaptive: bool) -> int:
    """The most bytes that the results of captured functions keep. They grow with every batch size and every shape.

    All verifications share the logits of the largest one, with those of the prompts in a mixed forward. Mixed
    forwards share their features too: they are captured for the shapes that occur, which nobody knows yet. Draft-extend
    is captured with each of its widths, and what computes trees twice, because attention to them is computed
    differently over long texts. `streams`: residual streams in a node's feature that a drafter reads.
    """
    hidden, logits = model.hidden_size * model.dtype.itemsize, model.vocab_size * model.logits_dtype.itemsize
    extend = (tree.topk + 1) * hidden + tree.topk * (12 + tree.model_steps * tree.topk) if tree.steps else 0
    rows, kept = 0, 0
    for size in sizes:
        kept += size * extend * len(extend_widths(tree.steps))
        for steps, nodes, fed in tree.captured_shapes(size, tree.topk, adaptive=adaptive):
            topk = fed or tree.topk
            rows = max(rows, size * nodes)
            tree_bytes = nodes * (nodes + 40) + 8 * topk**2 * steps  # mask, numbers and scores of nodes
            ways = 1 if topk == 1 or nodes == 1 else 2
            kept += ways * size * (nodes * max(1, streams) * hidden + tree_bytes)
    if rows:
        kept += MIXED_CHUNKS * logits + (rows + MIXED_ROWS) * max(1, streams) * hidden
    return rows * logits + kept


def memory_for_kv(config: Config, device: torch.device, reserved: int = 0) -> int:
    """Bytes that the KV pools may take. Call it after the weights are loaded; `reserved` bytes stay free."""
    if device.type == "cpu":
        return int(usable_memory() * CPU_MEMORY_FOR_KV) // config.device.tp_size
    free, total = torch.cuda.mem_get_info(device)
    share = config.device.mem_fraction_static or GPU_MEMORY
    left = int(total * share) - (total - free) - reserved
    if left <= 0:
        raise ConfigError(
            f"--mem-fraction-static {share}: the weights take {(total - free) / 2**30:.1f} GiB of the GPU's "
            f"{total / 2**30:.1f} GiB and CUDA graphs {reserved / 2**30:.1f} GiB, which leaves nothing for KV; give a "
            "larger share, or a smaller --cuda-graph-max-bs"
        )
    return left


def threads_for(config: ModelConfig) -> int:
    """All cores, but two for a small model: its operations are too short to split further."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    cores = usable_cores()
    return min(SMALL_MODEL_THREADS, cores) if weights < SMALL_MODEL else cores
