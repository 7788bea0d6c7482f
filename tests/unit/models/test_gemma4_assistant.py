"""Gemma 4's assistant against transformers' class: logits and feedback of every step, over the target's own KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from eagle_server.attention.batches import prefill_batch
from eagle_server.attention.interface import Causal, Layout
from eagle_server.attention.torch_native import torch_native
from eagle_server.engine.assembly.pools import make_pool
from eagle_server.models.checkpoints import load_target as load_target_module
from eagle_server.models.checkpoints.drafts.load_draft import load_draft
from eagle_server.models.checkpoints.load_target import load_target
from eagle_server.models.checkpoints.loading import Loading
from eagle_server.models.config import CheckpointError
from eagle_server.models.drafts.gemma4_assistant import Gemma4Assistant
from tests.parity import test_transformers_target as foreign
from tests.parity.checkpoints import CASES, VOCAB, write
from tests.support.engines import CONTEXT, MARGIN, plain, request, run, speculative, tokens_of

TEXT = 23  # tokens, more than the assistant's window


def write_assistant(
    directory: Path, *, shared: bool, centroids: int = 0, **settings: Any
) -> Gemma4AssistantForCausalLM:
    """An assistant for the parity case "gemma4", in transformers' format. `shared`: its target has shared layers."""
    text = Gemma4TextConfig(
        **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32},
        **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 7},
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3},
        **{"attention_k_eq_v": not shared, "num_global_key_value_heads": None if shared else 1, "pad_token_id": None},
    )
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=settings.get("backbone_hidden_size", 64),
        use_ordered_embeddings=bool(centroids),
        num_centroids=centroids or 1,
        centroid_intermediate_top_k=3,
    )
    torch.manual_seed(5)
    model = Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if "norm" in name else 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(VOCAB))
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
    model.tie_weights()
    model.eval().save_pretrained(directory)
    return model


@torch.inference_mode()
@pytest.mark.parametrize(
    ("case", "centroids"), [("gemma4", 0), ("gemma4", VOCAB), ("gemma4-keys-are-values", 0), ("gemma4-experts", 0)]
)
def test_steps_over_the_targets_kv_are_those_of_transformers(case: str, centroids: int, tmp_path: Path) -> None:
    theirs = write(CASES[case], tmp_path / "target")
    assistant = write_assistant(tmp_path / "assistant", shared=case == "gemma4", centroids=centroids)
    ours = load_target(tmp_path / "target", Loading(progress=False), dtype="float32")
    head = load_draft(tmp_path / "assistant", ours, Loading(context=64, progress=False))
    assert isinstance(head, Gemma4Assistant) and head.is_fused == ours.is_fused
    tokens = torch.randint(VOCAB, (TEXT + 1,), generator=torch.Generator().manual_seed(1))
    pool, table = make_pool(ours.config, 65, torch.device("cpu")), torch.randperm(64).int()[None] + 1
    pool.poison(torch.arange(1, 65))
    attention = torch_native(pool)

    def bound(length: int, count: int) -> Any:
        layout = Layout((count,), (length,))
        batch = prefill_batch(torch.tensor([0]), torch.tensor([length]), table, Causal(), layout)
        return attention.plan(layout).bind(batch)

    hidden = ours(tokens[:TEXT], torch.arange(TEXT), bound(TEXT, TEXT)).hidden[-1:]
    out = theirs.model(tokens[None, :TEXT], use_cache=True, return_shared_kv_states=True)
    last, token, position = out.last_hidden_state[:, -1:], tokens[TEXT:], torch.tensor([TEXT])
    torch.testing.assert_close(hidden, last[0], atol=1e-4, rtol=0)
    shared = windowed(dict(out.shared_kv_states), 7)
    for _ in range(3):
        found = head(token, hidden, position, bound(TEXT, 1))
        embedded = theirs.get_input_embeddings()(token[None])
        step = assistant(
            inputs_embeds=torch.cat([embedded, last], dim=-1), position_ids=position[None], shared_kv_states=shared
        )
        logits = head.logits(found.normed)
        assert torch.equal(logits.isfinite(), step.logits[0] > step.logits.min()) or not centroids
        finite = logits.isfinite()
        torch.testing.assert_close(logits[finite].float(), step.logits[0][finite], atol=2e-4, rtol=0)
        torch.testing.assert_close(found.feedback.float(), step.last_hidden_state[0], atol=2e-4, rtol=0)
        token, hidden, last = logits.argmax(1), found.feedback, step.last_hidden_state


def windowed(states: dict[str, tuple[Tensor, Tensor]], window: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The window counts `window` keys, as in decoding; transformers' mask for assistants has one more."""
    keys, values = states["sliding_attention"]
    return states | {"sliding_attention": (keys[:, :, -window:], values[:, :, -window:])}


def test_an_assistant_drafts_for_a_target_that_transformers_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With layers that write no KV. Trees, alone and in a batch."""
    monkeypatch.setattr(load_target_module, "find_family", lambda _: None)
    foreign.write(foreign.NATIVE["gemma4"], tmp_path / "target")
    write_assistant(tmp_path / "assistant", shared=True)
    ours = foreign.load(tmp_path / "target", context=CONTEXT)
    head = load_draft(tmp_path / "assistant", ours, Loading(context=CONTEXT, lookahead=MARGIN, progress=False))
    drawn = torch.randint(1, VOCAB, (4, 40), generator=torch.Generator().manual_seed(3)).tolist()
    requests = [request(i, prompt[: 9 * i + 3], max_tokens=24, ignore_eos=True) for i, prompt in enumerate(drawn)]
    engine = speculative(ours, head, 3, 12, page_size=4)  # type: ignore[arg-type]
    assert tokens_of(run(engine, requests)) == tokens_of(run(plain(ours), requests))  # type: ignore[arg-type]
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


def test_an_assistant_of_another_target_is_refused(tmp_path: Path) -> None:
    write(CASES["gemma4"], tmp_path / "target")
    ours = load_target(tmp_path / "target", Loading(progress=False), dtype="float32")
    write_assistant(tmp_path / "other", shared=False)
    with pytest.raises(CheckpointError, match=r"global layers with \(KV heads, size\) \(1, 32\), and .* \(2, 32\)"):
        load_draft(tmp_path / "other", ours, Loading(context=64, progress=False))
    write_assistant(tmp_path / "wide", shared=True, backbone_hidden_size=48)
    with pytest.raises(CheckpointError, match="backbone_hidden_size: the target's is 64, found 48: another target"):
        load_draft(tmp_path / "wide", ours, Loading(context=64, progress=False))
    write(CASES["llama"], tmp_path / "llama")
    write_assistant(tmp_path / "right", shared=True)
    llama = load_target(tmp_path / "llama", Loading(progress=False), dtype="float32")
    with pytest.raises(CheckpointError, match="another target"):
        load_draft(tmp_path / "right", llama, Loading(context=64, progress=False))
    raw = json.loads((tmp_path / "right" / "config.json").read_text())
    assert raw["model_type"] == "gemma4_assistant"
