"""Options of the machine: where the models run, and with which kernels."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from eagle_server.config.base import ConfigError, Count, Section


def _single_device(value: int) -> int:
    if value != 1:
        raise ValueError("should be 1: tensor parallelism is not available yet")
    return value


class DeviceSection(Section):
    """What it runs on."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: an NVIDIA GPU if there is one")
    attention_backend: Literal["auto", "torch_native", "flashinfer"] = Field(
        default="auto",
        description="auto: flashinfer on a GPU; torch_native on a CPU, and for float32, which FlashInfer does not take",
    )
    cpu_threads: Count | None = Field(
        default=None,
        description="threads that compute; auto: all cores, but two for a small model, whose operations are too short "
        "to be shared out, and one of the two while other processes keep the cores busy",
    )
    tp_size: Annotated[int, AfterValidator(_single_device)] = Field(
        default=1, description="devices that share the target; only 1 so far"
    )
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="share of the GPU's memory for weights and KV; without it, 0.85"
    )
    disable_cuda_graph: bool = Field(default=False, description="launch every GPU kernel from Python: slower, simpler")
    cuda_graph_max_bs: Count | None = Field(
        default=None,
        description="largest batch that CUDA graphs are captured for; without it, the running requests, at most 64",
    )

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.device == "cpu":
            self.refuse_gpu_options("--device is cpu")
        if self.disable_cuda_graph and self.cuda_graph_max_bs is not None:
            raise ConfigError("--cuda-graph-max-bs has no effect with --disable-cuda-graph: drop one of them")
        return self

    def refuse_gpu_options(self, reason: str) -> None:
        """Refuse what has a meaning on a GPU only.

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
