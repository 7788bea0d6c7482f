"""The log says at start where texts with speculation are not those without bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle_server.config import parse_args
from eagle_server.engine.assembly.from_config import load_models
from eagle_server.models.checkpoints.save import save_checkpoint
from eagle_server.ops.native.library import available, use_native
from tests.support.engines import random_config, random_target
from tests.support.hybrids import hybrid_config, hybrid_target

NGRAMS = ("--speculative-algorithm", "NGRAM")

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="needs the native kernels, and so a C++ compiler"
)


@pytest.fixture(autouse=True)
def _native_again() -> Iterator[None]:
    yield
    use_native("auto")


def warns(directory: Path, caplog: pytest.LogCaptureFixture, *flags: str) -> bool:
    arguments = ["--model-path", str(directory), "--device", "cpu", "--cpu-threads", "1", *flags]
    load_models(parse_args(arguments, environ={}), progress=False)
    found = [message for message in caplog.messages if "may differ in near-ties" in message]
    assert len(found) <= 1
    return bool(found)


@pytest.mark.parametrize(
    ("head_size", "flags", "expected"),
    [
        (100, NGRAMS, False),
        (640, NGRAMS, False),
        (642, NGRAMS, True),
        (642, ("--speculative-algorithm", "NONE"), False),
        (16, (*NGRAMS, "--cpu-kernels", "torch"), True),
        (16, (*NGRAMS, "--dtype", "bfloat16", "--cpu-kernels", "torch"), True),
    ],
)
def test_torchs_rounding_is_said_at_start(
    head_size: int, flags: tuple[str, ...], expected: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = {"layers": 1, "head_dim": head_size}
    save_checkpoint(random_target(**shape), tmp_path, random_config(**shape), torch.float32)
    assert warns(tmp_path, caplog, *flags) == expected


def test_layers_that_torch_computes_are_said_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(hybrid_target(64, kind="falcon"), tmp_path, hybrid_config(64, kind="falcon"), torch.float32)
    assert warns(tmp_path, caplog, *NGRAMS)
