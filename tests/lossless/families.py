"""What is served of every family, each cell of the table in docs/models.md by running a small model of it.

    python -m tests.lossless.families

writes the table again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eagle_server.engine.engine import Engine
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.checkpoints.transformers_config import TESTED
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.standalone import DraftLM
from eagle_server.models.targets.registry import FAMILIES
from eagle_server.models.wrappers import WRAPPERS
from tests.lossless.scenes import as_on_a_gpu
from tests.parity import checkpoints, test_transformers_target
from tests.parity.test_quantized_checkpoints import as_int8, compressed
from tests.parity.test_target_parity import Pages
from tests.support.engines import (
    CONTEXT,
    MARGIN,
    engine_config,
    plain,
    random_head,
    random_target,
    request,
    run,
    speculative,
    tokens_of,
)
from tests.support.ranks import SplitEngines

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: python -m tests.lossless.families -->", "<!-- end of families -->"
OTHERS = "OlmoForCausalLM"  # stands for all that run by transformers' code
YES, NO = "●", "–"


@dataclass(frozen=True)
class Toy:
    """A random checkpoint of a family, and three requests. Texts of every kind of engine must be the plain ones."""

    directory: Path

    @cached_property
    def target(self) -> Any:
        return self.load()

    @cached_property
    def requests(self) -> list[Any]:
        drawn = torch.randint(1, checkpoints.VOCAB, (3, 30), generator=torch.Generator().manual_seed(7)).tolist()
        return [
            request(i, prompt[: 9 + 9 * i], seed=i, temperature=0.7 * (i % 2), ignore_eos=True, max_tokens=12)
            for i, prompt in enumerate(drawn)
        ]

    @cached_property
    def texts(self) -> dict[str, list[int]]:
        return tokens_of(run(plain(self.target), self.requests))

    def load(self, **settings: Any) -> Any:
        how = Loading(context=CONTEXT, lookahead=MARGIN, progress=False, **settings)
        return load_target(self.directory, how, dtype="float32")

    @torch.inference_mode()
    def logits(self, target: Any) -> torch.Tensor:
        """Of a prompt, over paged KV."""
        prompt = torch.tensor(self.requests[2].prompt_token_ids)
        return Pages(target, 1, 2).logits([prompt], [0], [len(prompt)])[0]

    def has_plain_text(self, engine: Engine) -> bool:
        assert tokens_of(run(engine, self.requests[:2], joining={2: self.requests[2:]})) == self.texts
        assert engine.stats().drafted_tokens > 0
        return True


def _native(toy: Toy) -> bool:
    return bool(toy.target.is_fused)


def _flashinfer(toy: Toy) -> bool:
    return toy.has_plain_text(speculative(toy.target, random_head(toy.target, "EAGLE3"), **as_on_a_gpu(())))


def _graphs(toy: Toy) -> bool:
    head = random_head(toy.target, "EAGLE3")
    return not toy.target.config.waits and toy.has_plain_text(speculative(toy.target, head, **as_on_a_gpu((2, 4))))


def _ranks(toy: Toy) -> bool:
    with SplitEngines(toy.directory, 2) as split:
        return toy.has_plain_text(split.engine(lambda target: None, engine_config(ngram_steps=4, nodes=6)))


def _rounded(toy: Toy) -> bool:
    for quantization in ("int8", "int4"):
        target = toy.load(quantization=quantization)
        expected = tokens_of(run(plain(target), toy.requests))
        assert tokens_of(run(speculative(target, random_head(target, "EAGLE3")), toy.requests)) == expected
    return True


def _files(toy: Toy) -> bool:
    """Linear layers in int8, as compressed-tensors packs them, beside the same checkpoint with what they stand for."""
    raw, file = (toy.directory / "config.json").read_text(), toy.directory / "model.safetensors"
    whole, packed, dense = load_file(file), {}, {}
    for name, tensor in whole.items():
        is_linear = name.endswith("_proj.weight") and tensor.dim() == 2
        parts, meaning = as_int8(name.removesuffix(".weight"), tensor) if is_linear else ({name: tensor}, tensor)
        packed |= parts
        dense[name] = meaning
    config = toy.directory / "config.json"
    try:
        save_file(dense, file, metadata={"format": "pt"})
        expected = toy.logits(toy.load(pack=False))
        config.write_text(
            raw.rstrip()[:-1] + f', "quantization_config": {json.dumps(compressed(8, "int", "channel"))}}}'
        )
        save_file(packed, file, metadata={"format": "pt"})
        found = toy.logits(toy.load())
    finally:
        save_file(whole, file, metadata={"format": "pt"})
        config.write_text(raw)
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 0.1  # kernels for int8 round what they multiply by, so some rows choose another expert
    return True


def _drafts(toy: Toy) -> str:
    draft = toy.target if toy.target.config.recurrent is None else random_target(checkpoints.VOCAB)
    engines = {
        "EAGLE3": lambda: speculative(toy.target, random_head(toy.target, "EAGLE3")),
        "STANDALONE": lambda: speculative(toy.target, DraftLM(draft)),  # type: ignore[arg-type]
        "NGRAM": lambda: plain(toy.target, ngram_steps=4, nodes=6),
    }
    return ", ".join(name for name, made in engines.items() if toy.has_plain_text(made()))


COLUMNS: dict[str, Callable[[Toy], bool | str]] = {
    "one native call on a CPU": _native,
    "FlashInfer": _flashinfer,
    "CUDA graphs": _graphs,
    "`--tp-size`": _ranks,
    "`--quantization`": _rounded,
    "quantized files": _files,
    "drafters": _drafts,
}


def row(architecture: str, directory: Path) -> list[str]:
    """The cells of a family: name, what else it serves, and each column, by running it."""
    own = next((each for each in FAMILIES if each.architecture == architecture), None)
    if own is None:
        case = next(c for c in test_transformers_target.CASES.values() if c.model_type == "olmo")
        test_transformers_target.write(case, directory)
    else:
        kinds = {model.__name__: name for name, (_, model) in checkpoints.FAMILIES.items()}
        case = next(each for each in checkpoints.CASES.values() if each.family == kinds[architecture])
        checkpoints.write(case, directory, max_position_embeddings=CONTEXT)
    toy = Toy(directory)
    cells = []
    for proof in COLUMNS.values():
        try:
            found = proof(toy)
        except (CheckpointError, NotImplementedError):  # refused by name
            found = False
        cells.append(found if isinstance(found, str) else YES if found else NO)
    native = {family.model_type for family in FAMILIES}
    theirs = {kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in TESTED} - native
    served = theirs if own is None else {own.model_type}
    inside = [f"`{name}`" for name, each in WRAPPERS.items() if served & set(each.decoders)]
    name = "by transformers' code ¹" if own is None else architecture.removesuffix("ForCausalLM")
    return [name, ", ".join(inside), *cells]


def names() -> list[str]:
    return [*(family.architecture for family in FAMILIES), OTHERS]


def table(rows: Sequence[Sequence[str]]) -> str:
    """The section of docs/models.md."""
    head = ["family", "also the text of", *COLUMNS]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    listed = ", ".join(name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in TESTED)
    note = f"¹ Logits compared with transformers for each of these, cells run for Olmo: {listed}."
    return "\n".join((BEGIN, *lines, "", note, END))


def main() -> None:
    """Run every cell and write the table."""
    torch.set_num_threads(1)
    rows = []
    for architecture in names():
        with TemporaryDirectory() as directory:
            rows.append(row(architecture, Path(directory)))
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + table(rows) + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
