"""`eagle-server train capture`: the engine that serves computes token rows, and the target's features are written.

Each row is a prompt with one token to generate, so there is one forward per token, by chunked prefill, and no drafting.
Nothing is cached, so every position is computed.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eagle_server.config import Config, from_options
from eagle_server.engine.assembly.from_config import build_engine, build_rank, with_directory
from eagle_server.engine.engine import Engine
from eagle_server.engine.logs import LogStyle
from eagle_server.engine.process import CONFIGURATION_STATUS, Rank, follower_main
from eagle_server.models.checkpoints.weights import resolve_checkpoint
from eagle_server.models.checkpoints.whole_vocabulary import WholeVocabulary
from eagle_server.models.targets.interface import DraftedTarget, Target, TargetOutput
from eagle_server.plan import Chunk
from eagle_server.request import Request, SamplingParams
from eagle_tools.training.captured_target import check_logits, weights_of
from eagle_tools.training.fingerprint import fingerprint
from eagle_tools.training.heads import default_boundaries
from eagle_tools.training.rows.feature_files import CaptureFacts, begin_capture, file_of, files_of_rows, write_whole
from eagle_tools.training.rows.row_set import CutRow, kept_rows, token_rows

_GB = 1e9  # bytes


@dataclass(frozen=True)
class Capture:
    """What to capture, and where to.

    boundaries: of the residual streams; None: EAGLE-3's defaults. length: rows are cut to `length` + 1 tokens.
    most_gb: of disk, in 10^9 bytes; None: what is free.
    """

    data: Sequence[Path]
    out: Path
    boundaries: tuple[int, ...] | None
    length: int
    most_gb: float | None


def capture(asked: Capture, config: Config) -> str:
    """Capture the rows, or go on with it after a kill; returns what was done. `config` neither drafts nor caches.

    Raises:
        ValueError: a row or a configuration that cannot be served, another capture in `out`, or too little disk.
        OSError: a file that cannot be read or written.
    """
    config = with_directory(config)
    with running_engine(config) as engine:
        verifier = engine.worker.verifier
        target, ready = verifier.target, engine.ready()
        boundaries = asked.boundaries or default_boundaries(target.config.num_layers)
        _check_boundaries(boundaries, target.config.num_layers)
        length = min(asked.length, ready.max_request_tokens - 2)  # a row has one token more, and one is generated
        rows, others = kept_rows(token_rows(asked.data, ready.vocab_size), length)
        verifier.aux_boundaries = boundaries
        token_bytes = (len(boundaries) + 1) * target.config.hidden_size * target.config.dtype.itemsize
        files = files_of_rows([len(row.ids) for row in rows], token_bytes)
        weights = weights_of(target, _vocabulary(config, target))
        facts = CaptureFacts(
            architecture=target.config.architecture,
            hidden_size=target.config.hidden_size,
            vocab_size=ready.vocab_size,
            boundaries=boundaries,
            dtype=str(target.config.dtype).removeprefix("torch."),
            quantization=config.model.quantization,
            eos_token_ids=target.config.eos_token_ids,
            files=len(files),
            target=fingerprint(value.view(torch.uint8).numpy().tobytes() for value in weights.values()),
            rows=fingerprint(row.key.encode() for row in rows),
        )
        tokens = sum(len(row.ids) for row in rows)
        print(f"{len(rows)} rows of {tokens} tokens take {tokens * token_bytes / _GB:.3g} GB, ", end="")
        print(f"{token_bytes} bytes a token; {others}")
        _check_disk(asked, rows, token_bytes)
        missing = begin_capture(asked.out, facts, weights)
        recorder = FeatureRecorder(engine, boundaries)
        found = sum(
            len(row.ids) for number in set(range(len(files))) - set(missing) for row in _of(rows, files[number])
        )
        bar: tqdm[Any]
        with tqdm(total=tokens, initial=found, desc="capture", unit="token", unit_scale=True) as bar:
            recorder.run([(file_of(asked.out, number), _of(rows, files[number])) for number in missing], bar, weights)
    return f"{asked.out}: {len(rows)} rows, {tokens} tokens, boundaries {' '.join(map(str, boundaries))}"


def target_directory(path: str) -> Path:
    """The directory of a target: a directory, a Hub id or a GGUF file.

    Raises:
        CheckpointError: it cannot be read.
    """
    return resolve_checkpoint(with_directory(from_options({"model_path": path})).target_path)


class FeatureRecorder:
    """Takes the features of prompts from the engine's prefill. The seed of a request is the number of its row."""

    def __init__(self, engine: Engine, boundaries: Sequence[int]) -> None:
        verifier = engine.worker.verifier
        self.engine, self.config, self.streams = engine, verifier.target.config, len(boundaries)
        self._hidden = torch.empty(0)  # of the file that is being computed, [tokens, n + 1, H]
        self._starts: Sequence[int] = ()  # where each row begins in it
        self._bar: tqdm[Any] | None = None
        verifier.prefill_observers.append(self._take)

    def run(
        self, files: Sequence[tuple[Path, Sequence[CutRow]]], bar: tqdm[Any], weights: Mapping[str, Tensor]
    ) -> None:
        """Compute and write files, each while the next one is computed. `weights`: as `weights_of` gives them."""
        self._bar, is_checked = bar, False
        with ThreadPoolExecutor(1) as writer:
            written: Future[None] | None = None
            for path, rows in files:
                hidden = self.features_of(rows)
                if not is_checked:
                    check_logits(self.engine.worker.verifier.target, weights, hidden[:256, -1])
                    is_checked = True
                if written is not None:
                    written.result()
                written = writer.submit(_write, path, rows, hidden)
            if written is not None:
                written.result()

    def features_of(self, rows: Sequence[CutRow]) -> Tensor:
        """The features of the rows, one after the other, [tokens, n + 1, H].

        Raises:
            ValueError: a row cannot be served.
        """
        ends = torch.tensor([len(row.ids) for row in rows]).cumsum(0).tolist()
        self._starts = [0, *ends[:-1]]
        self._hidden = torch.empty(ends[-1], self.streams + 1, self.config.hidden_size, dtype=self.config.dtype)
        for number, row in enumerate(rows):
            sampling = SamplingParams(max_tokens=1, seed=number, temperature=0.0, ignore_eos=True)
            self.engine.add(Request(request_id=str(number), prompt_token_ids=row.ids.tolist(), sampling=sampling))
        while self.engine.has_work():
            for delta in self.engine.step():
                if delta.error is not None:
                    row = rows[int(delta.request_id)]
                    raise ValueError(f"the row with id {row.id!r} and gen {row.gen}: {delta.error}")
        return self._hidden

    def _take(self, chunks: tuple[Chunk, ...], out: TargetOutput) -> None:
        """Copy what the target gave for the rows of chunks."""
        assert out.aux is not None
        streams, first = out.aux.unflatten(1, (self.streams, -1)), 0
        for chunk in chunks:
            place = self._starts[chunk.sampling.params.seed] + chunk.start
            count = len(chunk.tokens)
            into, rows = self._hidden[place : place + count], slice(first, first + count)
            into[:, :-1].copy_(streams[rows])
            into[:, -1].copy_(out.hidden[rows])
            first += count
        if self._bar is not None:
            self._bar.update(first)


@contextmanager
def running_engine(config: Config) -> Iterator[Engine]:
    """The engine of a configuration. With --tp-size its other ranks have processes of their own until the end."""
    size = config.device.tp_size
    if size == 1:
        yield build_engine(config)
        return
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="eagle_server-") as directory:
        first, *others = (Rank(number, size, f"{directory}/rendezvous") for number in range(size))
        reports, report = spawn.Pipe(duplex=False)
        logs = LogStyle(config.server.log_level, config.observability.log_format)
        started = [
            spawn.Process(target=follower_main, args=(partial(build_rank, config, rank), Path(directory), report, logs))
            for rank in others
        ]
        is_over = threading.Event()
        for process in started:
            process.start()
        threading.Thread(target=_end_with, args=(started, reports, is_over), daemon=True).start()
        try:
            engine = build_rank(config, first)
            assert isinstance(engine, Engine)
            yield engine
        finally:
            is_over.set()
            for process in started:
                process.kill()


def _end_with(ranks: Sequence[BaseProcess], reports: Connection, is_over: threading.Event) -> None:
    """End this process if another rank ends too early: what waits for that rank would wait for ever."""
    wait([process.sentinel for process in ranks])
    if not is_over.is_set():
        failed = next(process for process in ranks if process.exitcode is not None)
        reason = reports.recv() if reports.poll() else f"it ended with status {failed.exitcode}"
        print(f"another rank of the engine ended: {reason}", file=sys.stderr, flush=True)
        os._exit(CONFIGURATION_STATUS)


def _vocabulary(config: Config, target: Target) -> DraftedTarget:
    """The whole embedding and lm_head of a target, of which this rank may have a part."""
    if target.config.split is None:
        return target
    directory, rounding = resolve_checkpoint(config.target_path), config.model.quantization
    return WholeVocabulary(target.config, directory, target.embed.device, rounding)


def _of(rows: Sequence[CutRow], numbers: range) -> Sequence[CutRow]:
    return rows[numbers.start : numbers.stop]


def _write(path: Path, rows: Sequence[CutRow], hidden: Tensor) -> None:
    token_ids, mask = (torch.cat([torch.from_numpy(row[part]) for row in rows]) for part in (0, 1))
    tensors = {"hidden_states": hidden, "token_ids": token_ids, "loss_mask": mask.to(torch.uint8)}
    write_whole(path, tensors, [(row.id, row.gen, len(row.ids)) for row in rows])


def _check_boundaries(boundaries: Sequence[int], layers: int) -> None:
    if list(boundaries) != sorted(set(boundaries)) or boundaries[0] < 0 or boundaries[-1] > layers:
        shown = " ".join(map(str, boundaries))
        raise ValueError(f"--aux-layers {shown}: name increasing boundaries in 0..{layers}, b for the stream after b")


def _check_disk(asked: Capture, rows: Sequence[CutRow], token_bytes: int) -> None:
    """
    Raises:
        ValueError: the features take more than is allowed, or free.
    """
    there = next(path for path in (asked.out, *asked.out.absolute().parents) if path.exists())
    own = sum(file.stat().st_size for file in asked.out.glob("features-*.safetensors"))
    free = shutil.disk_usage(there).free + own
    limit = min(free, free if asked.most_gb is None else asked.most_gb * _GB)
    fitting, taken = 0, 0
    for row in rows:
        taken += len(row.ids) * token_bytes
        fitting += taken <= limit
    if taken > limit:
        name = f"--max-gb {asked.most_gb:g}" if asked.most_gb is not None and limit < free else f"{there}"
        raise ValueError(
            f"{name}: {limit / _GB:.3g} GB are allowed or free, and the features take {taken / _GB:.3g}; give more, a "
            f"smaller --length, or only the first {fitting} rows"
        )
