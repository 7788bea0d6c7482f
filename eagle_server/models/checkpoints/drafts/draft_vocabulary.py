"""Vocabularies of drafts: checks against the target's, copies that can be shared, and the maps between both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles, flatten
from eagle_server.models.checkpoints.weights import StoredTensor, load_pickle, read_as
from eagle_server.models.config import CheckpointError
from eagle_server.models.targets.interface import DraftedTarget

_TOKENIZER = "tokenizer.json"
_SAME = 1e-6  # a float16 copy of a bfloat16 tensor differs less: the subnormal step of float16 is 6e-8
_ROWS = 4096
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")  # the first that is stated counts

log = logging.getLogger(__name__)


def draft_vocabulary(files: DraftFiles, declared: object, target_vocab: int) -> int:
    """The size Vd of a head's vocabulary. If config.json does not have it, the tensors decide.

    Raises:
        CheckpointError: the declared size is no positive integer.
    """
    if declared is not None and (not isinstance(declared, int) or declared <= 0):
        raise CheckpointError(
            f"{files.config_source}: draft_vocab_size must be a positive integer or null, found {declared!r}"
        )
    return declared or (files.shape("d2t") or files.shape("lm_head.weight") or (target_vocab,))[0]


def mask_token_id_of(value: Callable[[str], object], vocab: int, source: str) -> int:
    """The token of a draft's mask rows. `value` gives what config.json has under a key, or None.

    Raises:
        CheckpointError: none of the keys is stated, or it is no id of the target.
    """
    stated = (value(key) for key in _MASK_KEYS)
    token = next((each for each in stated if each is not None), None)
    if type(token) is not int or not 0 <= token < vocab:
        raise CheckpointError(
            f"{source}: mask_token_id: a token id in 0..{vocab - 1}, the rows of the target's embedding, is expected, "
            f"found {token!r}"
        )
    return token


def token_ids(files: DraftFiles, *, is_head: bool = False) -> int | None:
    """The number of ids that the tokenizers need; None: they are unknown.

    A head's files seldom have a tokenizer. Then its target's counts.

    Raises:
        CheckpointError: an id means another token in the draft's tokenizer than in the target's.
    """
    if files.target is None or files.is_target:
        return None
    mine, theirs = (directory / _TOKENIZER for directory in (files.directory, files.target))
    if not theirs.is_file() or not (is_head or mine.is_file()):
        return None
    import tokenizers  # only here, because a GPU benchmark loads heads without this package

    known = [
        tokenizers.Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
        for file in (mine, theirs)
        if file.is_file()
    ]
    if known[0] != known[-1]:
        token = min(t for t in known[0] | known[-1] if known[0].get(t) != known[-1].get(t))
        raise CheckpointError(
            f"{mine}: another vocabulary than {theirs}: token {token!r} is {known[0].get(token)} there and "
            f"{known[-1].get(token)} in the target's; choose a draft of the same family"
        )
    return max(known[-1].values(), default=-1) + 1


def with_target_rows(
    files: DraftFiles,
    target: DraftedTarget,
    *,
    has_map: bool,
    of_target_ids: Sequence[str] = (),
    of_draft_ids: Sequence[str] = (),
) -> DraftFiles:
    """`files` with the rows of the target's vocabulary, if theirs are more or fewer by padding alone.

    Models of one family often have embeddings of several sizes for one tokenizer. A head that was trained on one of
    them drafts for the others too. Rows that no token needs are cut. Missing ones are the target's where both are as
    wide, else zero. If only an lm_head of its own lacks some, they are never drafted. `has_map`: this format can have a
    reduced vocabulary. The tensors `of_target_ids` and `of_draft_ids` have a row per id; missing ones are zero.

    Raises:
        CheckpointError: the draft has a tokenizer, which is not the target's.
    """
    vocab, tensors = target.config.vocab_size, dict(files.tensors)
    rows = (files.shape("embed_tokens.weight") or files.shape("t2d") or (flatten(files).get("vocab_size"),))[0]
    used = token_ids(files, is_head=True) if isinstance(rows, int) and rows != vocab else None
    if used is None or not isinstance(rows, int) or used > min(rows, vocab):
        return files
    changed, flat = {"vocab_size": vocab}, flatten(files)
    if "d2t" not in tensors and files.shape("lm_head.weight")[:1] == (rows,):
        head, theirs = tensors["lm_head.weight"], target.lm_head.dense_weight()[:rows]
        if head.shape == theirs.shape and is_copy(head.read(), theirs):
            del tensors["lm_head.weight"]
        elif rows > vocab:
            tensors["lm_head.weight"] = _with_rows(head, vocab)
            changed["draft_vocab_size"] = vocab
        elif has_map:
            tensors["d2t"] = StoredTensor(head.file, "d2t", (rows,), lambda: torch.zeros(rows, dtype=torch.int64))
    if "embed_tokens.weight" in tensors:
        tensors["embed_tokens.weight"] = _with_rows(tensors["embed_tokens.weight"], vocab, target.embed)
    if "d2t" not in tensors and flat.get("draft_vocab_size") == rows:
        changed["draft_vocab_size"] = vocab
    for name in ("t2d", *of_target_ids, *(() if "d2t" in tensors else of_draft_ids)):
        if files.shape(name)[:1] == (rows,):
            tensors[name] = _with_rows(tensors[name], vocab)
    sizes = files.directory, rows, vocab, used
    log.info("%s: made for %d rows of a vocabulary, the target has %d; the tokenizer needs %d of them", *sizes)
    return replace(files, tensors=tensors, overrides={**files.overrides, **changed})


def _with_rows(stored: StoredTensor, rows: int, missing: Tensor | None = None) -> StoredTensor:
    """The first rows of a tensor, and rows of `missing` or zeros after its last one."""
    shape = (rows, *stored.shape[1:])

    def read() -> Tensor:
        own = stored.read()[:rows]
        if missing is None or missing.shape != shape:
            return torch.cat([own, own.new_zeros(rows - len(own), *shape[1:])])
        return torch.cat([own, missing.detach()[len(own) :].to(own.device, own.dtype)])

    return StoredTensor(stored.file, stored.key, shape, read)


def check_vocabulary(files: DraftFiles, target: DraftedTarget, draft_vocab: int) -> None:
    """Compare the vocabulary sizes V and Vd of the files with the target.

    Raises:
        CheckpointError: another target's vocabulary, t2d without d2t, or a smaller vocabulary without a map.
    """
    vocab, source = target.config.vocab_size, files.directory
    for name in ("embed_tokens.weight", "t2d"):
        shape = files.shape(name)
        if shape and shape[0] != vocab:
            raise CheckpointError(
                f"{source}: {name}: the target's vocabulary has {vocab} entries, found {shape[0]} rows: another "
                "target, or another revision of its tokenizer?"
            )
    mapped = "d2t" in files.tensors
    if "t2d" in files.tensors and not mapped:
        raise CheckpointError(f"{source}: d2t: missing; t2d alone does not tell the order of the draft's ids")
    if draft_vocab != vocab and not mapped:
        raise CheckpointError(
            f"{source}: d2t: missing; a draft vocabulary of {draft_vocab} needs a map to the target's {vocab} entries"
        )
    if draft_vocab != vocab and "lm_head.weight" not in files.tensors:
        raise CheckpointError(f"{source}: lm_head.weight: missing; the target's has {vocab} rows, not {draft_vocab}")


def without_copies(files: DraftFiles, target: DraftedTarget) -> DraftFiles:
    """`files` without an embedding or lm_head equal to the target's. These are shared with the target."""
    tensors, shape = dict(files.tensors), (target.config.vocab_size, target.config.hidden_size)
    theirs: dict[str, Callable[[], Tensor]] = {
        "embed_tokens.weight": lambda: target.embed,
        "lm_head.weight": target.lm_head.dense_weight,
    }
    for name, read in theirs.items():
        if files.shape(name) == shape and is_copy(tensors[name].read(), read()):
            del tensors[name]
    return replace(files, tensors=tensors)


def with_map(files: DraftFiles, draft_vocab: int, vocab: int) -> DraftFiles:
    """`files` with a checked vocabulary map, if they hold one: target id = i + d2t[i], and t2d marks the same ids.

    ModelOpt exports no t2d, which follows from d2t.

    Raises:
        CheckpointError: ids are repeated, outside of the vocabulary, or different from those in t2d.
    """
    if "d2t" not in files.tensors:
        return files
    stored = files.tensors["d2t"]
    marks = _marked(read_as(stored, (draft_vocab,), floating=False).long(), vocab, files)
    if "t2d" not in files.tensors:
        t2d = StoredTensor(stored.file, "t2d", tuple(marks.shape), lambda: marks)
        return replace(files, tensors={**files.tensors, "t2d": t2d})
    in_t2d = read_as(files.tensors["t2d"], (vocab,), floating=False).bool()
    if not torch.equal(marks, in_t2d):
        raise CheckpointError(
            f"{files.directory}: d2t: offsets (target id = i + d2t[i]) are expected that give the {int(in_t2d.sum())} "
            "ids marked in t2d, found others"
        )
    return files


def _marked(d2t: Tensor, vocab: int, files: DraftFiles) -> Tensor:
    """bool [vocab], true at the ids of a map. Raise CheckpointError if ids are repeated or outside of 0..vocab - 1."""
    ids = torch.arange(len(d2t), device=d2t.device) + d2t
    where = f"{files.directory}: d2t: offsets (target id = i + d2t[i]) are expected"
    if bool((ids < 0).any()) or bool((ids >= vocab).any()):
        raise CheckpointError(f"{where} that give ids in 0..{vocab - 1}, found {int(ids.min())}..{int(ids.max())}")
    if len(set(ids.tolist())) != len(ids):
        raise CheckpointError(f"{where} that give distinct ids, found {len(ids) - len(set(ids.tolist()))} repeated")
    return torch.zeros(vocab, dtype=torch.bool, device=ids.device).index_fill(0, ids, value=True)


def load_token_map(path: Path, vocab: int) -> Tensor:
    """An FR-Spec token map from a file saved by torch: target ids int64 [Vd], in any order.

    Raises:
        CheckpointError: the file is not a 1-D list of distinct integers in 0..vocab - 1.
    """
    content = load_pickle(path)
    is_list = isinstance(content, list) and all(type(item) is int for item in content)
    ids = torch.tensor(content, device="cpu") if is_list else content
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.is_floating_point() or not len(ids):
        raise CheckpointError(f"{path}: a 1-D list of token ids is expected, found {type(content).__name__}")
    ids = ids.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != len(ids):
        raise CheckpointError(f"{path}: distinct token ids in 0..{vocab - 1} are expected, found others")
    return ids


def is_copy(mine: Tensor, theirs: Tensor) -> bool:
    """Whether one is a rounded copy of the other. Drafts are often stored in float16, targets in bfloat16."""
    pairs = ((mine[row : row + _ROWS], theirs[row : row + _ROWS].to(mine.device)) for row in range(0, len(mine), _ROWS))
    return all(_close(a.to(b.dtype), b) or _close(a, b.to(a.dtype)) for a, b in pairs)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=_SAME)
