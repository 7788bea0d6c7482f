"""The openai package, sync and async, against a server process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.api.conftest import Server, serving
from tests.api.fake_engine import DRAFTED_PER_CYCLE, EOS, PLAIN
from tests.api.test_chat import TEMPLATE, TOOL


@pytest.fixture(scope="module")
def chatting(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("chatting")
    (directory / "template.jinja").write_text(TEMPLATE)
    environ = {"EAGLE_SERVER_CHAT_TEMPLATE": str(directory / "template.jinja")}
    with serving(tokenizer_dir, directory / "log", environ=environ) as running:
        yield running


@pytest.fixture
def client(chatting: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chatting.url}/v1", api_key="none", max_retries=0) as made:
        yield made


HI = [{"role": "user", "content": f"hé😀{EOS}"}]
SAID = "user=hé😀"


def test_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=HI, logprobs=True, top_logprobs=2, extra_body={"min_p": 0.1, "speculative": False}
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content[:-1]) == SAID.encode()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    # The server accepts the messages that the package returned.
    conversation = [*HI, choice.message.model_dump(), {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(model="fake", messages=conversation, max_tokens=3).choices


def predicted(answer: openai.types.chat.ChatCompletion | openai.types.Completion) -> tuple[int, int]:
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens is not None and details.rejected_prediction_tokens is not None
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def test_completions_count_drafted_tokens_and_none_without_drafts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=40, seed=0, n=2)
    accepted, rejected = predicted(answer)
    assert min(accepted, rejected) > 0 == (accepted + rejected) % DRAFTED_PER_CYCLE
    assert predicted(client.completions.create(model="fake", prompt=f"abc{PLAIN}", max_tokens=40)) == (0, 0)


def test_chats_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=HI, seed=1)
    options, asked = {"include_usage": True}, {"model": "fake", "messages": HI, "seed": 1}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == SAID
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage
    assert predicted(whole) > (0, 0)
    with client.chat.completions.stream(model="fake", messages=HI) as events:  # the package joins the chunks
        assert events.get_final_completion().choices[0].message.content == SAID


def test_tools_reach_the_template(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HI, tools=[TOOL], tool_choice="auto", max_tokens=20)
    assert answer.choices[0].message.content == '[{"type": "function"'
    assert answer.choices[0].message.tool_calls is None


async def test_many_chats_at_once(chatting: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{chatting.url}/v1", api_key="none") as client:

        async def chat(number: int) -> str:
            messages = [{"role": "user", "content": f"number {number}"}]
            chunks = await client.chat.completions.create(model="fake", messages=messages, stream=True, max_tokens=14)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        answers = await asyncio.gather(*(chat(number) for number in range(10, 26)))
        assert answers == [f"user=number {number}"[:14] for number in range(10, 26)]
        completed = await client.completions.create(model="fake", prompt="abc", max_tokens=6, logit_bias={"97": 1})
        assert completed.choices[0].text == "abcabc"


def test_errors_have_the_packages_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.APIStatusError) as late:
        slow = [{"role": "user", "content": "<|stall|>"}]
        client.chat.completions.create(model="fake", messages=slow, extra_body={"timeout": 0.05})
    assert late.value.status_code == 408


def test_the_client_s_request_id_is_on_its_answer(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="fake", messages=HI, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse().id == "chatcmpl-mine"


def test_a_broken_template_is_one_line(tokenizer_dir: Path, tmp_path: Path) -> None:
    from tests.api.test_lifecycle import wrong_start

    (tmp_path / "template").write_text("{% if %}")
    flags = ("--model-path", str(tokenizer_dir), "--chat-template", str(tmp_path / "template"))
    status, lines = wrong_start(tmp_path, *flags)
    assert status == 2
    assert lines[-1].startswith("eagle_server: error: the chat template is broken")
    assert not any("Traceback" in line for line in lines)


def test_it_is_served_as_it_says(chatting: Server) -> None:
    assert httpx.get(f"{chatting.url}/tokenizer_info").json()["chat_template"] == TEMPLATE
