"""Draft formats that are recognized in order to be refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from eagle_server.models.checkpoints.drafts.draft_format import DraftFiles

# Some have tensors of formats that are supported, so these rules come first.
_RULES: Mapping[str, Callable[[DraftFiles], bool]] = {
    "Hydra": lambda f: "hydra_num_heads" in f.config or f.has_prefix("hydra_"),
    "XPress": lambda f: f.has_part("xpress_head", "refiner_head"),
    "LiLiCorr": lambda f: f.has_part("lilicorr"),
    "UNO": lambda f: f.has_part("lora_A", "lora_B"),
    "Laguna's DFlash": lambda f: f.has_part("aux_hidden_norms"),
    "Muse-Glimmer's assistant": lambda f: f.has_prefix("encoder.fc"),
    "PARD": lambda f: "pard_token" in f.config and "fc.weight" not in f.tensors,
    "MLPSpeculator": lambda f: "n_predict" in f.config or f.has_prefix("emb.", "proj."),
}


def unsupported_format(files: DraftFiles) -> str | None:
    """The name of the format of these files; None: it is none of those that are known and not supported."""
    return next((name for name, matches in _RULES.items() if matches(files)), None)
