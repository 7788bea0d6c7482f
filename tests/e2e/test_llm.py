"""The Python API: the server's texts, without a server."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from eagle_server import LLM, SamplingParams
from tests.e2e.conftest import PROMPTS, Served


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # Fixed trees: on a busy machine a budget may draft nothing.
    yield LLM("demo", speculative_num_steps=3, topk=4, speculative_adaptive="off", cpu_threads=1, progress=False)


def served_choice(served: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{served.url}{path}", json=body, timeout=60).json()
    choice: dict[str, Any] = answer["choices"][0]
    return choice


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0, "max_tokens": 40},
        {"temperature": 0.9, "seed": 7, "max_tokens": 40},
        {
            "temperature": 0.7,
            "seed": 3,
            "top_p": 0.9,
            "max_tokens": 60,
            "stop": ["\n\n"],
            "include_stop_str_in_output": True,
        },
        {"temperature": 0, "max_tokens": 12, "structured_outputs": {"regex": "[0-9]{4}"}},
    ],
    ids=str,
)
def test_equal_seeds_give_the_servers_texts(llm: LLM, served: Served, parameters: dict[str, Any]) -> None:
    outputs = llm.generate(PROMPTS[:4], SamplingParams(**parameters), use_tqdm=False)
    for prompt, output in zip(PROMPTS[:4], outputs, strict=True):
        expected = served_choice(served, "/v1/completions", prompt=prompt, return_token_ids=True, **parameters)
        [choice] = output.outputs
        assert (choice.text, choice.finish_reason) == (expected["text"], expected["finish_reason"])
        assert choice.token_ids == expected["token_ids"]
        assert (output.prompt, output.prompt_token_ids) == (prompt, expected["prompt_token_ids"])


def test_chats_are_those_of_the_server(llm: LLM, served: Served) -> None:
    messages = [{"role": "user", "content": "def f(x):"}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    expected = served_choice(served, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=20)
    assert output.outputs[0].text == expected["message"]["content"]
    both = llm.chat([messages, messages], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert [each.outputs[0].text for each in both] == [output.outputs[0].text] * 2


def test_what_ended_a_text_is_said(llm: LLM) -> None:
    [plain] = llm.generate("def f(", max_tokens=20, temperature=0, use_tqdm=False)
    [ended] = llm.generate("def f(", max_tokens=20, temperature=0, stop=[plain.outputs[0].text[3:5]], use_tqdm=False)
    assert plain.outputs[0].stop_reason is None
    assert ended.outputs[0].stop_reason == plain.outputs[0].text[3:5]
    assert ended.outputs[0].finish_reason == "stop"


def test_choices_logprobs_and_metrics(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=8, logprobs=2)
    first, second = llm.generate([[*range(20, 30)], PROMPTS[0]], params, use_tqdm=False)
    assert (first.prompt, first.prompt_token_ids) == (None, [*range(20, 30)])
    assert [choice.index for choice in second.outputs] == [0, 1]
    for choice in second.outputs:
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids) == 8
        assert all(token in scores for token, scores in zip(choice.token_ids, choice.logprobs, strict=True))
    assert second.metrics is None
    [alone] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    assert alone.metrics is not None and alone.metrics.num_accepted_draft_tokens > 0
    assert alone.outputs[0].logprobs is None


@pytest.mark.parametrize("n", [1, 2])
def test_best_of_gives_the_servers_choices(llm: LLM, served: Served, n: int) -> None:
    parameters = {"n": n, "best_of": 4, "temperature": 1.0, "seed": 3, "max_tokens": 12}
    body = {"model": "demo", "prompt": PROMPTS[:2], **parameters}
    expected = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()["choices"]
    outputs = llm.generate(PROMPTS[:2], SamplingParams(**parameters), use_tqdm=False)
    assert [choice.text for output in outputs for choice in output.outputs] == [each["text"] for each in expected]
    assert [[choice.index for choice in output.outputs] for output in outputs] == [[*range(n)]] * 2
    assert all(choice.logprobs is None for output in outputs for choice in output.outputs)
    every = llm.generate(PROMPTS[0], SamplingParams(**{**parameters, "n": 4}), use_tqdm=False)[0].outputs
    assert {choice.text for choice in outputs[0].outputs} < {choice.text for choice in every}


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    lengths = [3, 9]
    outputs = llm.generate(
        PROMPTS[:2], [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths], use_tqdm=False
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
        llm.generate(PROMPTS[:2], [SamplingParams()])


def test_parameters_by_name_are_those_of_sampling_params(llm: LLM) -> None:
    named = {"max_tokens": 12, "temperature": 0.8, "seed": 5}
    [expected] = llm.generate(PROMPTS[0], SamplingParams(**named), use_tqdm=False)
    [output] = llm.generate(PROMPTS[0], use_tqdm=False, **named)
    assert output.outputs[0] == expected.outputs[0]
    messages = [{"role": "user", "content": "def f(x):"}]
    [answer] = llm.chat(messages, max_completion_tokens=5, ignore_eos=True, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 5
    with pytest.raises(ValueError, match="unknown parameter max_token"):
        llm.generate("a", max_token=3)
    with pytest.raises(ValueError, match="max_tokens: give it in sampling_params, or all parameters by name"):
        llm.generate("a", SamplingParams(seed=1), max_tokens=3)


@pytest.mark.parametrize(("is_terminal", "use_tqdm"), [(True, True), (True, False), (False, True)], ids=str)
def test_a_terminal_shows_the_progress(
    llm: LLM, is_terminal: bool, use_tqdm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr", shown)
    llm.generate(PROMPTS[:2], max_tokens=2, use_tqdm=use_tqdm)
    llm.chat([{"role": "user", "content": "a"}], max_tokens=2, use_tqdm=use_tqdm)
    assert ("2/2" in shown.getvalue() and "1/1" in shown.getvalue()) == (is_terminal and use_tqdm)
    assert bool(shown.getvalue()) == (is_terminal and use_tqdm)


def test_mistakes_are_named_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(ValueError, match="unknown parameter max_token"):
        SamplingParams(max_token=3)
    with pytest.raises(ValueError, match="unknown option speculative_num_stepz; did you mean speculative_num_steps"):
        LLM("demo", speculative_num_stepz=3)
    with pytest.raises(ValueError, match="tensor_parallel_size; it is --tp-size here"):
        LLM("demo", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="return_trees: the outputs of LLM have no place for it"):
        SamplingParams(return_trees=True)
    with pytest.raises(ValueError, match="either prompt or prompt_token_ids"):
        llm.generate({"prompt_embeds": [1]})
    with pytest.raises(ValueError, match="maximum context length"):
        llm.generate(["fine", "x" * 100_000])
    with pytest.raises(ValueError, match="structured_outputs|grammar"):
        llm.generate(["a"], SamplingParams(structured_outputs={"regex": "("}))
    [output] = llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


def test_chats_take_the_parameters_of_chats(llm: LLM) -> None:
    messages = [{"role": "user", "content": "def f(x):"}]
    [output] = llm.chat(messages, SamplingParams(logprobs=2, max_completion_tokens=5, seed=1), use_tqdm=False)
    scores = output.outputs[0].logprobs
    assert scores is not None and len(scores) == len(output.outputs[0].token_ids) <= 5
    assert all(2 <= len(each) <= 3 for each in scores)
    with pytest.raises(ValueError, match="needs tools"):
        SamplingParams(tool_choice="required")


def test_a_prompt_may_be_a_dict_as_in_vllm(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0)
    [text], [own] = llm.generate(PROMPTS[0], greedy), llm.generate({"prompt": PROMPTS[0]}, greedy)
    [ids] = llm.generate({"prompt_token_ids": text.prompt_token_ids}, greedy)
    assert own.outputs == text.outputs
    assert ids.outputs == text.outputs
    assert "UNSET" not in repr(text)


def test_it_needs_no_application(llm: LLM) -> None:
    """Nor its packages: the service of the endpoints is made without them."""
    code = (
        "import sys\n"
        "for name in ('fastapi', 'prometheus_client', 'uvicorn'):\n"
        "    sys.modules[name] = None\n"
        "from eagle_server import LLM\n"
        "llm = LLM('demo', cpu_threads=1, progress=False)\n"
        f"[output] = llm.generate({PROMPTS[0]!r}, temperature=0, max_tokens=4, use_tqdm=False)\n"
        "print(repr(output.outputs[0].text))"
    )
    [output] = llm.generate(PROMPTS[0], temperature=0, max_tokens=4, use_tqdm=False)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.strip() == repr(output.outputs[0].text), ran.stderr
