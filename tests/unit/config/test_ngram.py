"""The options of n-gram drafting, alone and beside a head."""

from __future__ import annotations

import pytest

from eagle_server.config import DEMO_DRAFT, ConfigError, SpeculativeSection, TreeOptions
from eagle_server.config.sections import Config, ModelSection

LLAMA, DEEPSEEK = "LlamaForCausalLM", "DeepseekV3ForCausalLM"


def config(algorithm: str | None, model_path: str | None = None, **options: object) -> Config:
    section = SpeculativeSection.model_validate({"algorithm": algorithm, **options})
    return Config(model=ModelSection(model_path=model_path), speculative=section)


@pytest.mark.parametrize("model_path", [None, "owner/model"])
def test_ngrams_need_no_draft(model_path):
    drafting = config("NGRAM", model_path)
    assert drafting.speculates
    assert drafting.draft_path is None
    assert drafting.public_dict()["speculative"]["ngram_depth"] == 8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (8, 0, 16, 8)),
        ({"num_steps": 3}, (3, 0, 16, 3)),
        ({"num_draft_tokens": 40}, (8, 0, 40, 8)),
        ({"num_steps": 12, "num_draft_tokens": 2}, (12, 0, 2, 12)),
    ],
)
def test_depth_and_nodes_of_tries_are_given_or_chosen(options, expected):
    section = SpeculativeSection(algorithm="NGRAM", **options)
    assert section.tree_options(LLAMA) == TreeOptions(*expected)


@pytest.mark.parametrize(
    "options",
    [
        {"eagle_topk": 4},
        {"draft_model_path": "owner/head"},
        {"draft_config_override": "{}"},
        {"medusa_choices": "mc_sim_7b_63"},
    ],
    ids=str,
)
def test_what_shapes_a_head_is_refused_for_ngrams_alone(options):
    with pytest.raises((ConfigError, ValueError), match="has no effect with --speculative-algorithm NGRAM"):
        config("NGRAM", "owner/model", **options)


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3+NGRAM"])
def test_a_tree_of_the_root_alone_is_refused(algorithm):
    options = {} if algorithm == "NGRAM" else {"num_steps": 1, "eagle_topk": 2}
    with pytest.raises((ConfigError, ValueError), match="should be 2 or more"):
        config(algorithm, num_draft_tokens=1, **options)


@pytest.mark.parametrize(
    ("algorithm", "architecture", "options", "expected"),
    [
        ("EAGLE3+NGRAM", LLAMA, {}, (5, 4, 8, 8)),
        ("NEXTN+NGRAM", DEEPSEEK, {}, (3, 1, 8, 8)),
        ("EAGLE+NGRAM", LLAMA, {"num_steps": 3, "eagle_topk": 4}, (3, 4, 13, 8)),
        ("EAGLE+NGRAM", LLAMA, {"num_steps": 3}, (3, 4, 13, 8)),
        ("EAGLE+NGRAM", LLAMA, {"num_draft_tokens": 24}, (5, 4, 24, 8)),
        ("STANDALONE+NGRAM", LLAMA, {"num_draft_tokens": 24}, (3, 1, 24, 8)),
        ("STANDALONE+NGRAM", LLAMA, {"num_steps": 5}, (5, 1, 8, 8)),
        ("EAGLE+NGRAM", LLAMA, {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 16}, (3, 1, 16, 8)),
        ("EAGLE+NGRAM", LLAMA, {"num_steps": 1, "eagle_topk": 2, "num_draft_tokens": 64}, (1, 2, 64, 8)),
    ],
)
def test_a_mixture_keeps_the_heads_tree_and_has_any_number_of_nodes(algorithm, architecture, options, expected):
    section = SpeculativeSection(algorithm=algorithm, **options)
    assert section.tree_options(architecture) == TreeOptions(*expected)


def test_a_mixture_has_the_drafts_of_its_head():
    assert config("EAGLE3+NGRAM").draft_path == str(DEMO_DRAFT)
    assert config("NEXTN+NGRAM", "owner/model").draft_path == "owner/model"
    assert config("MTP+NGRAM", "owner/model").speculative.algorithm == "NEXTN+NGRAM"
    assert config("EAGLE+NGRAM", "owner/model", draft_model_path="owner/head").speculative.head_algorithm == "EAGLE"
    with pytest.raises((ConfigError, ValueError), match="EAGLE\\+NGRAM needs --speculative-draft-model-path"):
        config("EAGLE+NGRAM", "owner/model")
    with pytest.raises((ConfigError, ValueError), match="needs --model-path"):
        config("NEXTN+NGRAM")


@pytest.mark.parametrize(("options", "nodes"), [({}, None), ({"num_draft_tokens": 20}, 20)])
def test_medusa_beside_ngrams_may_say_how_many_nodes_are_verified(options, nodes):
    drafting = config("MEDUSA+NGRAM", "owner/model", draft_model_path="owner/heads", **options)
    assert drafting.speculative.head_algorithm == "MEDUSA"
    assert drafting.speculative.num_draft_tokens == nodes
    assert drafting.speculative.tree_options(LLAMA).ngram_depth == 8


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("MEDUSA+NGRAM", {"num_steps": 3, "eagle_topk": 2}, "trees follow from --medusa-choices alone"),
        ("MEDUSA+NGRAM", {"num_draft_tokens": 1}, "should be 2 or more"),
        ("MEDUSA", {"num_draft_tokens": 20}, "trees follow from --medusa-choices alone"),
        ("REDRAFTER+NGRAM", {"medusa_choices": "mc_sim_7b_63"}, "--medusa-choices has no effect"),
        ("NGRAM", {"typical_posterior_alpha": 0.5}, "--speculative-typical-posterior-alpha needs --acceptance typical"),
        ("NONE", {"acceptance": "typical"}, "--speculative-acceptance has no effect"),
        ("NGRAM", {"acceptance": "typical", "coupling": "on"}, "--speculative-coupling needs --acceptance lossless"),
        ("NONE", {"coupling": "off"}, "--speculative-coupling has no effect"),
        ("NGRAM", {"acceptance": "typical", "typical_posterior_threshold": 0.0}, "greater than 0"),
    ],
    ids=str,
)
def test_what_has_no_effect_or_no_sense_is_refused(algorithm, options, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        config(algorithm, "owner/model", **options)


def test_typical_acceptance_is_shown_with_its_numbers():
    shown = config("NGRAM", acceptance="typical", typical_posterior_alpha=0.5).public_dict()
    assert shown["speculative"]["acceptance"] == "typical"
    assert shown["speculative"]["typical_posterior_threshold"] == 0.09
    assert shown["speculative"]["typical_posterior_alpha"] == 0.5
    assert config("NGRAM").public_dict()["speculative"]["typical_posterior_alpha"] is None


def test_drafts_are_coupled_unless_that_is_off_or_acceptance_is_lossy():
    assert config("NGRAM").speculative.couples
    assert config("NGRAM", coupling="on").speculative.couples
    assert not config("NGRAM", acceptance="typical").speculative.couples
    for off in ("off", False):  # YAML reads off as false
        assert not config("NGRAM", coupling=off).speculative.couples
