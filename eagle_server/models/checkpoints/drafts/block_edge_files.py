"""What block drafters' files hold beside the trunk: edges (DFlash 2, DSpark, Domino), convolutions and confidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles
from eagle_server.models.config import CheckpointError
from eagle_server.models.config_json import integer
from eagle_server.models.drafts.block import BlockConfig
from eagle_server.models.drafts.block_edges import CANDIDATES, EdgeConfig, EdgeKind

_CODEBOOK, _MARKOV = "candidate_selector.predecessor_codebook", "markov_head.markov_w1.weight"
OF_TARGET_IDS = (_CODEBOOK, _MARKOV)  # tensors with a row per token
OF_DRAFT_IDS = ("candidate_selector.successor_codebook", "markov_head.markov_w2.weight", "embed_proj.2.weight")

Stated = Callable[[str], Any]  # what config.json has under a key; None: nothing


def edges_of(files: DraftFiles, stated: Stated) -> EdgeConfig | None:
    """The edges, by the tensors.

    Raises:
        CheckpointError: config.json states something else, or the tensors are incomplete.
    """
    _agree(files, stated, _CODEBOOK, {"selector_rank": files.matrix(_CODEBOOK)[1]})
    _agree(files, stated, _MARKOV, {"markov_rank": files.matrix(_MARKOV)[1]})
    if files.has_prefix("prefix_gru.", "embed_proj.") or stated("projector_type") == "domino":
        return _gru_edges(files, stated)
    if files.has_prefix("candidate_selector."):
        top_k = {"selector_top_k": stated("selector_top_k")}
        kept = integer(top_k, "selector_top_k", files.config_source, default=CANDIDATES)
        return EdgeConfig("selector", files.matrix(_CODEBOOK)[1], candidates=kept)
    if not files.has_prefix("markov_head."):
        return None
    kind: EdgeKind = "vanilla"
    if "markov_head.gate_proj.weight" in files.tensors:
        kind = "gated"
    elif "markov_head.joint_proj.weight" in files.tensors:
        kind = "rnn"
    _agree(files, stated, _MARKOV, {"markov_head_type": kind})
    return EdgeConfig(kind, files.matrix(_MARKOV)[1])


def _agree(files: DraftFiles, stated: Stated, tensor: str, found: Mapping[str, object]) -> None:
    """Check what config.json states under the keys of `found` against what follows from a tensor; 0: it is missing.

    Raises:
        CheckpointError: they differ.
    """
    for key, value in found.items():
        if stated(key) not in (None, value):
            found_here = f"the tensors say {value!r}" if tensor in files.tensors else f"{tensor} is missing"
            raise CheckpointError(f"{files.config_source}: {key}: {stated(key)!r} is stated, but {found_here}")


def _gru_edges(files: DraftFiles, stated: Stated) -> EdgeConfig:
    """Domino's. SGLang refuses longer prefixes, too."""
    rank, size = files.matrix("embed_proj.2.weight")[1], files.matrix("prefix_gru.weight_hh_l0")[1]
    if not rank or not size:
        raise CheckpointError(
            f"{files.directory}: Domino's embed_proj.2.weight and prefix_gru.weight_hh_l0 are expected"
        )
    first = stated("pure_draft_prefix_len")
    if type(first) is not int or first not in (0, 1):
        raise CheckpointError(f"{files.config_source}: pure_draft_prefix_len: 0 or 1 is expected, found {first!r}")
    sizes = {"projector_type": "domino", "emb_dim": rank, "gru_hidden_dim": size}
    _agree(files, stated, "embed_proj.2.weight", sizes)
    return EdgeConfig("gru", rank, size, after_root=first == 0)


def convolution_of(files: DraftFiles, stated: Stated) -> tuple[int, int] | None:
    """(taps, channels that share a dynamic kernel) of DFlash 2's convolutions; None: there are none.

    Raises:
        CheckpointError: config.json states something else, or a shape is wrong.
    """
    at = "layers.0.attention_conv."
    base, rows = files.shape(f"{at}base_kernel"), files.matrix(f"{at}kernel_projection.weight")[0]
    if base and (len(base) != 3 or base[0] != 2 or rows < 1 or 2 * base[1] * base[2] % rows):  # noqa: PLR2004
        raise CheckpointError(f"{files.directory}: {at}base_kernel: [2, taps, hidden] is expected, found {list(base)}")
    taps, group = (base[1], 2 * base[1] * base[2] // rows) if base else (0, 0)
    _agree(files, stated, f"{at}base_kernel", {"conv_kernel_size": taps, "conv_group_size": group})
    return (taps, group) if base else None


def confidence_of(files: DraftFiles, stated: Stated, config: BlockConfig) -> int | None:
    """`BlockConfig.confidence_rank` by the tensors.

    Raises:
        CheckpointError: they read something else, or config.json states something else.
    """
    weight, said = "confidence_head.proj.weight", stated("confidence_head_with_markov")
    _agree(files, stated, weight, {"enable_confidence_head": weight in files.tensors})
    if not files.has_prefix("confidence_head."):
        return None
    width, hidden, edges = files.matrix(weight)[1], config.layers.hidden_size, config.edges
    ranks = {hidden: 0} if edges is None or edges.kind == "gru" else {hidden: 0, hidden + edges.rank: edges.rank}
    rank = ranks.get(width)
    if rank is None or said not in (None, rank > 0):
        raise CheckpointError(
            f"{files.config_source}: confidence_head_with_markov: {said} is stated, but confidence_head.proj.weight "
            f"reads {width} numbers; expected is one of {sorted(ranks)}"
        )
    return rank


def check_edges(config: BlockConfig, source: str) -> None:
    """Refuse what no reader of Domino's files defines: which embedding its GRU reads, and which scores it corrects.

    Raises:
        CheckpointError: the head has an embedding of its own, or scales embeddings or scores.
    """
    if config.edges is None or config.edges.kind != "gru":
        return
    defined = (config.own_embed, config.embed_scale, config.logit_scale, config.logits_softcap) == (False, 1, 1, 0)
    if not defined:
        raise CheckpointError(
            f"{source}: a Domino head with an embedding of its own, input_embedding_scale, output_multiplier or "
            "final_logit_softcapping is not supported"
        )
