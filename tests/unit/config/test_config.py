"""Configuration: where options come from, which wins, and how wrong ones are refused."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from eagle_server.algorithms import DEEPEST_TREE
from eagle_server.config import (
    DEMO_DRAFT,
    DEMO_TARGET,
    Config,
    ConfigError,
    ServerSection,
    SpeculativeSection,
    TreeOptions,
    parse_args,
)
from eagle_server.config.other_names import OTHER_NAMES
from eagle_server.config.sources import COMMON, OPTIONS, changed_options
from eagle_server.version import version

ROOT = Path(__file__).parents[3]
SECRET = "sesame-open"


def parse(*argv: str, **environ: str) -> Config:
    return parse_args(argv, environ)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    """The message of a refused command line, having checked that it is one line and the exit status 2."""
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv, **environ)
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2
    assert out == ""
    assert err.startswith("eagle_server: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("eagle_server: error: ").rstrip("\n")


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "options.yaml"
        path.write_text(text)
        return str(path)

    return write


# --- Defaults and the demo ---


def test_without_options_the_demo_is_served_with_its_own_head():
    config = parse()
    assert config == Config()
    assert (config.target_path, config.draft_path) == (str(DEMO_TARGET), str(DEMO_DRAFT))
    assert config.served_model_name == "demo"
    assert (config.server.host, config.server.port) == ("127.0.0.1", 30000)
    assert config.scheduler.max_running_requests == 48
    assert config.cache.page_size == 1


def test_algorithm_none_serves_the_demo_without_a_head():
    config = parse("--speculative-algorithm", "NONE")
    assert not config.speculates
    assert config.draft_path is None


def test_a_target_without_a_draft_is_served_plainly():
    config = parse("--model-path", "owner/model")
    assert not config.speculates
    assert (config.target_path, config.draft_path, config.served_model_name) == ("owner/model", None, "owner/model")


def test_a_local_target_is_named_after_its_directory(tmp_path):
    (tmp_path / "some-model").mkdir()
    config = parse("--model-path", str(tmp_path / "some-model"))
    assert config.served_model_name == "some-model"
    assert parse("--model-path", str(tmp_path), "--served-model-name", "x").served_model_name == "x"


def test_config_is_frozen_and_survives_the_way_to_the_engine_process():
    config = parse("--page-size", "16", "--api-key", SECRET)
    with pytest.raises(ValidationError):
        config.cache.page_size = 1
    assert pickle.loads(pickle.dumps(config)) == config


# --- Sources ---


def test_flags_win_over_yaml_over_environment_over_defaults(yaml_file):
    environment = {"EAGLE_SERVER_PAGE_SIZE": "2", "EAGLE_SERVER_PORT": "2000", "EAGLE_SERVER_HOST": "environment"}
    config = parse("--page-size", "8", "--config", yaml_file("page-size: 4\nport: 4000\n"), **environment)
    assert (config.cache.page_size, config.server.port, config.server.host) == (8, 4000, "environment")
    assert config.scheduler.chunked_prefill_size == 512


def test_every_flag_has_its_yaml_key_and_environment_variable(yaml_file):
    values = {
        "speculative-num-steps": "3",
        "speculative-eagle-topk": "4",
        "speculative-num-draft-tokens": "9",
        "disable-radix-cache": "true",
        "max-total-tokens": "4096",
        "dtype": "float32",
    }
    lines = "".join(f"{name}: {value}\n" for name, value in values.items())
    from_yaml = parse("--config", yaml_file(lines))
    from_underscores = parse(EAGLE_SERVER_CONFIG=yaml_file(lines.replace("-", "_")))
    from_environment = parse(**{f"EAGLE_SERVER_{k.upper().replace('-', '_')}": v for k, v in values.items()})
    flags = [word for k, v in values.items() for word in ([f"--{k}"] if v == "true" else [f"--{k}", v])]
    assert from_yaml == from_underscores == from_environment == parse(*flags)
    assert from_yaml.speculative.num_draft_tokens == 9
    assert from_yaml.cache.disable_radix_cache


def test_topk_is_an_alias_and_the_readme_command_is_understood():
    config = parse("--speculative-num-steps", "3", "--topk", "4")
    assert (config.speculative.num_steps, config.speculative.eagle_topk) == (3, 4)


def test_a_targets_own_mtp_layer_is_asked_for_by_name_or_by_its_path():
    for flags in (("algorithm", "NEXTN"), ("algorithm", "MTP"), ("draft-model-path", "owner/model")):
        config = parse("--model-path", "owner/model", f"--speculative-{flags[0]}", flags[1])
        assert config.draft_path == "owner/model"
        assert config.speculative.algorithm in ("NEXTN", None)


def test_draft_config_override_is_a_json_object_or_a_yaml_mapping(yaml_file):
    override = {"rope_theta": 10000.0, "norm_output": False}
    prefix = ("--model-path", "owner/model", "--speculative-draft-model-path", "owner/head")
    by_flag = parse(*prefix, "--speculative-draft-config-override", json.dumps(override))
    file = yaml_file("speculative-draft-config-override:\n  rope_theta: 10000.0\n  norm_output: false\n")
    assert by_flag.speculative.draft_config_override == override
    assert parse(*prefix, "--config", file) == by_flag


@pytest.mark.parametrize("preset", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_is_valid_and_speculates(preset):
    assert parse("--config", str(preset)).speculates


# --- Refusals ---


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--page-size", "0"], "--page-size '0': should be greater than or equal to 1"),
        (["--page-size", "-1"], "--page-size '-1': should be greater than or equal to 1"),
        (["--page-size", "big"], "--page-size 'big': should be a valid integer"),
        (["--page-size", "1\n2"], r"--page-size '1\n2': should be a valid integer"),
        (["--page-size"], "argument --page-size: expected one argument"),
        (["--port", "70000"], "--port '70000': should be less than or equal to 65535"),
        (["--dtype", "float8"], "--dtype 'float8': should be 'auto', 'float32' or 'bfloat16'"),
        (["--attention-backend", "cpu"], "--attention-backend 'cpu': should be 'auto', 'torch_native' or 'flashinfer'"),
        (
            ["--attention-backend", "flashinfer", "--device", "cpu"],
            "--attention-backend flashinfer needs an NVIDIA GPU",
        ),
        (["--device", "cpu", "--cuda-graph-max-bs", "8"], "--cuda-graph-max-bs has an effect on a GPU only"),
        (["--device", "cpu", "--mem-fraction-static", "0.5"], "--mem-fraction-static has an effect on a GPU only"),
        (["--disable-cuda-graph", "--cuda-graph-max-bs", "8"], "--cuda-graph-max-bs has no effect with --disable-cuda"),
        (["--mem-fraction-static", "1.5"], "--mem-fraction-static '1.5': should be less than 1"),
        (["--tp-size", "0"], "--tp-size '0': should be greater than or equal to 1"),
        (["--tp-size", "2", "--cuda-graph-max-bs", "8"], "--cuda-graph-max-bs has no effect with --tp-size above 1"),
        (
            ["--speculative-algorithm", "eagle"],
            "--speculative-algorithm 'eagle': should be 'NONE', 'DFLASH', 'EAGLE', 'EAGLE3', ",
        ),
        (["--model-path", "/no/such/place"], "--model-path '/no/such/place': no such directory"),
        (["--model-path", ""], "--model-path is empty: give it a value, or leave it out"),
        (["--model-path", str(ROOT / "LICENSE")], f"--model-path '{ROOT / 'LICENSE'}': no such directory"),
        (["--speculative-token-map", "map.pt"], "--speculative-token-map 'map.pt': no such file"),
        (["--speculative-draft-config-override", "{"], "--speculative-draft-config-override '{': should be a JSON"),
        (["--speculative-draft-config-override", "[1]"], "--speculative-draft-config-override '[1]': should be a"),
        (["--paeg-size", "4"], "unknown flag --paeg-size; did you mean --page-size?"),
        (["--model"], "unknown flag --model; it is --model-path here"),
        (["--max-model-len", "4"], "unknown flag --max-model-len; it is --context-length here"),
        (["serve"], "unknown flag serve; --help-all lists what there is"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line_that_says_what_is_allowed(capsys, argv, message):
    assert refusal(capsys, *argv).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page-sizes: 4\n", "unknown key in {file}: page-sizes; did you mean page-size?"),
        ("page-size: true\n", "{file}: page-size 'true': should be a valid integer"),
        ("page-size: [1]\n", "{file}: page-size [1]: should be a valid integer"),
        ("page-size:\n", "{file}: page-size None: should be a valid integer"),
        ("page_size: 4\npage-size: 4\n", "{file}: page-size stands there twice"),
        ("- page-size\n", "--config {file}: should hold lines like 'page-size: 16'"),
        ("", "--config {file}: should hold lines like"),
        ("page-size: [\n", "--config {file}: not valid YAML: "),
    ],
)
def test_a_wrong_yaml_file_is_refused_with_its_name_and_key(capsys, yaml_file, text, message):
    file = yaml_file(text)
    assert refusal(capsys, "--config", file).startswith(message.format(file=file))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("EAGLE_SERVER_PAGE_SIZ", "4", "unknown environment variable EAGLE_SERVER_PAGE_SIZ; did you mean EAGLE_SER"),
        ("EAGLE_SERVER_PAGE_SIZE", "x", "EAGLE_SERVER_PAGE_SIZE 'x': should be a valid integer"),
        ("EAGLE_SERVER_DISABLE_RADIX_CACHE", "perhaps", "EAGLE_SERVER_DISABLE_RADIX_CACHE 'perhaps': should be a va"),
        ("EAGLE_SERVER_API_KEY", "", "EAGLE_SERVER_API_KEY is empty: give it a value, or leave it out"),
        ("EAGLE_SERVER_CONFIG", "", "--config (EAGLE_SERVER_CONFIG) is empty: give it a value, or leave it out"),
        ("EAGLE_SERVER_PORT", "", "EAGLE_SERVER_PORT is empty: give it a value, or leave it out"),
    ],
)
def test_a_wrong_environment_variable_is_refused_by_name(capsys, variable, value, message):
    assert refusal(capsys, **{variable: value}).startswith(message)


def test_an_empty_flag_is_refused_by_name(capsys):
    assert refusal(capsys, "--api-key", "").startswith("--api-key is empty: give it a value, or leave it out")


def test_other_environment_variables_are_not_looked_at():
    assert parse(PORT="1", EAGLE_PORT="1", eagle_server_port="1") == Config()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--speculative-draft-model-path", "owner/head"],
            "--speculative-draft-model-path needs --model-path",
        ),
        (
            [
                *("--model-path", str(ROOT), "--speculative-draft-model-path", str(ROOT / "configs" / "..")),
                *("--speculative-algorithm", "EAGLE"),
            ],
            f"--speculative-draft-model-path {ROOT / 'configs' / '..'}: should differ from --model-path, which is no",
        ),
        (
            ["--speculative-algorithm", "NEXTN"],
            "--speculative-algorithm NEXTN needs --model-path: the demo's target does not hold an MTP layer",
        ),
        (
            ["--model-path", "owner/model", "--speculative-algorithm", "EAGLE"],
            "--speculative-algorithm EAGLE needs --speculative-draft-model-path",
        ),
        (
            ["--model-path", "owner/model", "--speculative-num-steps", "3", "--topk", "4"],
            "--speculative-num-steps needs --speculative-draft-model-path",
        ),
        (
            ["--speculative-algorithm", "NONE", "--speculative-num-steps", "3", "--topk", "4"],
            "--speculative-num-steps has no effect with --speculative-algorithm NONE",
        ),
        (
            ["--speculative-num-draft-tokens", "1"],
            "--speculative-num-draft-tokens 1: should be 2 or more: the root is one of them",
        ),
        (
            ["--speculative-num-steps", "3", "--topk", "4", "--speculative-num-draft-tokens", "38"],
            "--speculative-num-draft-tokens 38: should be from 2 to 37: 3 steps with topk 4 give 4 + 2 * 4 * 4 = 36",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(capsys, argv, message):
    assert refusal(capsys, *argv).startswith(message)


# --- Help, dry run, secrets ---


def test_help_names_every_group_and_exits_with_0(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse("--help")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for word in ("model options", "speculative options", "cache options", "scheduler options", "server options"):
        assert word in text
    assert "examples:" in text
    assert "[default: 30000]" in text


def test_dry_run_prints_the_resolved_configuration(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse("--dry-run", "--speculative-num-steps", "3", "--topk", "4")
    assert exit_info.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["model"]["model_path"] == str(DEMO_TARGET)
    assert printed["speculative"]["draft_model_path"] == str(DEMO_DRAFT)
    assert printed["speculative"]["num_draft_tokens"] == 13
    assert printed["server"]["api_key"] is None


def test_the_api_key_is_shown_nowhere(capsys):
    config = parse(EAGLE_SERVER_API_KEY=SECRET)
    assert config.server.api_key is not None
    assert config.server.api_key.get_secret_value() == SECRET
    assert SECRET not in json.dumps(config.public_dict()) + repr(config) + str(config) + config.model_dump_json()
    assert SECRET not in refusal(capsys, "--api-key", SECRET, "--port", "x")
    assert SECRET not in refusal(capsys, f"--api-kye={SECRET}")


def test_an_api_key_in_yaml_that_is_no_text_is_refused_without_showing_it(capsys, yaml_file):
    assert refusal(capsys, "--config", yaml_file("api-key: 12345678\n")).endswith("api-key: should be a valid string")


def test_configuration_needs_no_torch():
    code = "import sys, eagle_server.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# --- Tree parameters ---


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", (5, 4, 8)),
        ("Qwen3ForCausalLM", (5, 4, 8)),
        ("Grok1ForCausalLM", (5, 4, 8)),
        ("DeepseekV2ForCausalLM", (3, 1, 4)),
        ("DeepseekV3ForCausalLM", (3, 1, 4)),
    ],
)
def test_tree_parameters_are_chosen_by_architecture(architecture, expected):
    assert SpeculativeSection().tree_options(architecture) == TreeOptions(*expected)


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        ((3, 4, None), (3, 4, 13)),
        ((1, 4, None), (1, 4, 5)),
        ((1, 1, None), (1, 1, 2)),
        ((5, 4, 8), (5, 4, 8)),
        ((8, 8, 457), (8, 8, 457)),
        ((3, 4, 2), (3, 4, 2)),
    ],
)
def test_given_tree_parameters_win_over_the_architecture(given_values, expected):
    steps, topk, draft_tokens = given_values
    section = SpeculativeSection(num_steps=steps, eagle_topk=topk, num_draft_tokens=draft_tokens)
    assert section.tree_options("DeepseekV3ForCausalLM") == TreeOptions(*expected)


@pytest.mark.parametrize(
    ("given_values", "llama", "deepseek"),
    [
        ((3, None, None), (3, 4, 13), (3, 1, 4)),
        ((None, 2, None), (5, 2, 11), (3, 2, 7)),
        ((None, 1, None), (5, 1, 6), (3, 1, 4)),
        ((None, None, 16), (5, 4, 16), (15, 1, 16)),
        ((None, None, 3), (2, 4, 3), (2, 1, 3)),
        ((None, None, 64), (5, 4, 64), (63, 1, 64)),
        ((None, None, 100), (7, 4, 100), (7, 4, 100)),
        ((None, 1, 8), (7, 1, 8), (7, 1, 8)),
        ((None, 2, 40), (11, 2, 40), (11, 2, 40)),
        ((3, None, 8), (3, 4, 8), (3, 4, 8)),
        ((3, None, 4), (3, 4, 4), (3, 1, 4)),
    ],
    ids=str,
)
def test_what_is_not_given_of_a_tree_fits_what_is(given_values, llama, deepseek):
    steps, topk, draft_tokens = given_values
    section = SpeculativeSection(num_steps=steps, eagle_topk=topk, num_draft_tokens=draft_tokens)
    assert section.tree_options("LlamaForCausalLM") == TreeOptions(*llama)
    assert section.tree_options("DeepseekV3ForCausalLM") == TreeOptions(*deepseek)


@given(
    steps=st.none() | st.integers(1, 12),
    topk=st.none() | st.integers(1, 12),
    nodes=st.none() | st.integers(2, 250),
    architecture=st.sampled_from(["LlamaForCausalLM", "DeepseekV3ForCausalLM"]),
)
def test_some_tree_options_alone_keep_their_values(steps, topk, nodes, architecture):
    """All but steps with draft tokens, which may contradict each other."""
    assume((steps is None or nodes is None) and (topk != 1 or (nodes or 0) <= DEEPEST_TREE + 1))
    found = SpeculativeSection(num_steps=steps, eagle_topk=topk, num_draft_tokens=nodes).tree_options(architecture)
    assert steps in (None, found.num_steps) and topk in (None, found.eagle_topk)
    assert nodes in (None, found.num_draft_tokens)
    assert 1 <= found.num_steps < found.num_draft_tokens


def test_trees_of_too_many_levels_are_refused():
    with pytest.raises(ValidationError, match=r"--speculative-num-steps 64: trees have at most 63 levels"):
        SpeculativeSection(num_steps=64, eagle_topk=1)


def test_a_chain_verifies_its_steps_and_the_root():
    exact = SpeculativeSection(num_steps=3, eagle_topk=1, num_draft_tokens=4).tree_options("")
    adjusted = SpeculativeSection(num_steps=3, eagle_topk=1, num_draft_tokens=8).tree_options("")
    assert exact == adjusted == TreeOptions(3, 1, 4)


@given(steps=st.integers(1, 12), topk=st.integers(1, 12))
def test_steps_and_topk_alone_always_give_a_tree_that_the_candidates_can_fill(steps, topk):
    params = SpeculativeSection(num_steps=steps, eagle_topk=topk).tree_options("")
    candidates = topk + (steps - 1) * topk**2
    assert params.num_draft_tokens == steps * topk + 1
    assert 2 <= params.num_draft_tokens <= candidates + 1


@given(steps=st.integers(1, 6), topk=st.integers(2, 6), draft_tokens=st.integers(1, 300))
def test_draft_tokens_are_accepted_exactly_up_to_the_candidates_and_the_root(steps, topk, draft_tokens):
    allowed = 2 <= draft_tokens <= topk + (steps - 1) * topk**2 + 1
    try:
        SpeculativeSection(num_steps=steps, eagle_topk=topk, num_draft_tokens=draft_tokens)
    except ValidationError:
        assert not allowed
    else:
        assert allowed


def test_sections_refuse_unknown_names():
    with pytest.raises(ValidationError):
        ServerSection.model_validate({"prot": 1})
    assert issubclass(ConfigError, ValueError)


def test_algorithm_none_switches_a_presets_drafting_off(tmp_path):
    preset = tmp_path / "preset.yaml"
    preset.write_text("speculative-num-steps: 3\nspeculative-eagle-topk: 4\npage-size: 16\n")
    config = parse("--config", str(preset), "--speculative-algorithm", "NONE")
    assert not config.speculates
    assert config.cache.page_size == 16


def test_the_short_help_shows_the_common_options_and_the_long_one_all(capsys):
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as exit_info:
            parse(flag)
        assert exit_info.value.code == 0
        texts.append(capsys.readouterr().out)
    short, long = texts
    assert set(COMMON) <= OPTIONS.keys()
    assert {name for name in OPTIONS if f"--{name} " in short} <= set(COMMON)
    assert all(f"--{name}" in long for name in OPTIONS)
    assert len(short.splitlines()) < len(long.splitlines()) / 1.7


def test_changed_options_are_those_that_were_given(capsys):
    config = parse("--port", "8123", "--topk", "4", "--speculative-num-steps", "3", EAGLE_SERVER_API_KEY=SECRET)
    assert changed_options(config) == [
        "--speculative-num-steps 3",
        "--speculative-eagle-topk 4",
        "--port 8123",
        "--api-key (set)",
    ]
    assert changed_options(parse()) == []
    with pytest.raises(SystemExit):
        parse("--version")
    assert capsys.readouterr().out.strip() == version()


def test_other_servers_names_lead_to_options_that_exist() -> None:
    assert not OTHER_NAMES.keys() & set(OPTIONS)
    named = [flag for words in OTHER_NAMES.values() for flag in re.findall(r"--([a-z][\w-]*\w)(?!-)\b", words)]
    assert len(named) > 10
    assert set(named) - {"speculative"} <= set(OPTIONS)
