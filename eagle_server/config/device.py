"""Options of the device: where the models run, and with which kernels."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from eagle_server.config.base import ConfigError, Count, Section


class DeviceSection(Section):
    """The device, and the kernels that run on it."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: the first NVIDIA GPU, or the CPU if there is none"
    )
    attention_backend: Literal["auto", "torch_native", "flashinfer"] = Field(
        default="auto",
        description="auto: flashinfer on a GPU; torch_native on a CPU, and for float32, which FlashInfer lacks",
    )
    cpu_threads: Count | None = Field(
        default=None,
        description="compute threads; default: all cores of one NUMA node that the process and its container may use, "
        "but 2 for a small model, whose operations are too short to split further, and 1 of the 2 while other "
        "processes keep the cores busy; divided by --tp-size, as each of its processes has its own",
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        default="auto",
        description="who computes on a CPU. native: kernels that are compiled at the first start, in seconds; torch: "
        "PyTorch; auto: native, or torch where there is no C++ compiler",
    )
    tp_size: Count = Field(
        default=1,
        description="processes that the target is split over, each with a GPU of this machine, or all on its CPUs; "
        "drafts run in the first; more than 1 is not tested on GPUs",
    )
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="fraction of the GPU's memory for weights and KV; default: 0.85"
    )
    disable_cuda_graph: bool = Field(
        default=False, description="launch every GPU kernel from Python: slower, but simpler to debug"
    )
    cuda_graph_max_bs: Count | None = Field(
        default=None,
        description="largest batch size with CUDA graphs; default: --max-running-requests, at most 64",
    )

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.device == "cpu":
            self.refuse_gpu_options("--device is cpu")
        if self.tp_size > 1 and self.cuda_graph_max_bs is not None:
            raise ConfigError("--cuda-graph-max-bs has no effect with --tp-size above 1, which has no CUDA graphs")
        if self.disable_cuda_graph and self.cuda_graph_max_bs is not None:
            raise ConfigError("--cuda-graph-max-bs has no effect with --disable-cuda-graph: drop one of them")
        return self

    def refuse_gpu_options(self, reason: str) -> None:
        """Refuse options that have an effect on a GPU only.

        Raises:
            ConfigError: such an option was given.
        """
        if self.attention_backend == "flashinfer":
            raise ConfigError(f"--attention-backend flashinfer needs an NVIDIA GPU, but {reason}")
        for flag, value in (
            ("--mem-fraction-static", self.mem_fraction_static),
            ("--cuda-graph-max-bs", self.cuda_graph_max_bs),
            ("--disable-cuda-graph", self.disable_cuda_graph),
        ):
            if value:
                raise ConfigError(f"{flag} has an effect on a GPU only, but {reason}")
