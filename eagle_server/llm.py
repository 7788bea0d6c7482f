"""Generation without a server: the engine runs in this process. The shape is vLLM's.

    from eagle_server import LLM, SamplingParams
    for output in LLM("demo").generate(["def f(x):"], SamplingParams(max_tokens=64, temperature=0)):
        print(output.outputs[0].text)

Prompts, parameters and answers go through the code of the HTTP endpoints, so equal seeds give the server's texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tqdm import tqdm

from eagle_server.api.endpoints.chat import CHAT_COMPLETIONS, ToolCall, tool_calls_of
from eagle_server.api.endpoints.completions import COMPLETIONS
from eagle_server.api.errors import ApiError
from eagle_server.api.generation.endpoint import Endpoint
from eagle_server.api.generation.prepare import Prepared
from eagle_server.api.generation.request_state import OutputDelta, RequestState, ScoredToken
from eagle_server.api.generation.response_parts import SpeculativeMetrics
from eagle_server.api.schemas.base import parse
from eagle_server.api.schemas.chat import ChatRequest
from eagle_server.api.schemas.completion import CompletionRequest
from eagle_server.api.service import Service
from eagle_server.client.client import EngineClient
from eagle_server.config import from_options
from eagle_server.engine.assembly.from_config import build_engine, with_directory
from eagle_server.request import TokenDelta
from eagle_server.text.chat_template_files import load_chat_template
from eagle_server.text.tokenizer import load_tokenizer

DEMO = "demo"
CHAT_ONLY = ChatRequest.model_fields.keys() - CompletionRequest.model_fields.keys()
UNSEEN = frozenset({"prompt_logprobs", "return_trees", "stream", "stream_options"})
Prompt = str | Sequence[int] | Mapping[str, Any]


class GenerationParams:
    """How to sample: the endpoints' parameters by name, see docs/api.md. max_tokens is 16 unless given.

    Parameters of chats alone, like tools, are for `LLM.chat`; logprobs is the number of alternatives in both.

    Raises:
        ValueError: an unknown parameter or a value that is not allowed; the message names it.
    """

    def __init__(self, **parameters: Any) -> None:
        self.parameters = parameters
        if unseen := [name for name in parameters if name in UNSEEN]:
            raise ValueError(f"{unseen[0]}: the outputs of LLM have no place for it; the server's have")
        if parameters.keys() & CHAT_ONLY:
            _parsed(ChatRequest, self.of_chat([{"role": "user", "content": ""}]))
        else:
            _parsed(CompletionRequest, {"prompt": "", **parameters})

    def of_chat(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The body of a chat."""
        body = {"messages": list(messages), **self.parameters}
        if "max_completion_tokens" not in body:
            body.setdefault("max_tokens", 16)
        if (count := body.pop("logprobs", None)) is not None:
            body |= {"logprobs": True, "top_logprobs": int(count)}
        return body

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.parameters.items())})"


SamplingParams = GenerationParams  # vLLM's name, which the engine's own struct has here


@dataclass
class CompletionOutput:
    """One choice. logprobs: per token, the log-probabilities of its alternatives and itself by id; None: not requested.

    stop_reason: the stop text or stop token of the parameters that ended it. Chats set `reasoning` and `tool_calls`,
    and leave both out of `text`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """The choices of one prompt. metrics: of speculation; None with several choices, or if nothing was drafted."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: SpeculativeMetrics | None = None


class LLM:
    """A model and its engine.

    Args:
        model: a directory or Hugging Face id; "demo" is the embedded pair.
        options: the server's options, as in a YAML file of --config: `LLM(m, speculative_draft_model_path=d)`.

    Raises:
        ValueError: an option, or a checkpoint that cannot be served; the message says what to change.
        OSError: a file that cannot be read.
    """

    def __init__(self, model: str = DEMO, *, progress: bool = True, **options: Any) -> None:
        config = from_options({**({} if model == DEMO else {"model_path": model}), **options})
        if config.server.record_rows_dir is not None:
            raise ValueError("record_rows_dir: a server records; here outputs have token_ids and prompt_token_ids")
        config = with_directory(config)
        location = config.model.tokenizer_path or config.target_path
        tokenizer = load_tokenizer(location)
        template = load_chat_template(location, tokenizer, config.model.chat_template)
        self._service = Service.of(config, EngineClient(), tokenizer, template)
        self._engine = build_engine(config, progress=progress)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """Continue prompts, all together; the outputs are in the order of the prompts.

        A prompt is a text, a list of token ids, or a dict with one of them as `prompt` or `prompt_token_ids`.
        `parameters` are short for one SamplingParams: `generate(prompts, max_tokens=64)`. `use_tqdm` shows a progress
        bar, if stderr is a terminal.

        Raises:
            ValueError: a prompt or its parameters cannot be served; nothing is generated then.
        """
        single = isinstance(prompts, (str, Mapping)) or _is_ids(prompts)
        several = [_text_or_ids(prompt) for prompt in ([prompts] if single else prompts)]
        settings = _for_each(several, sampling_params, parameters)
        bodies = [
            {"prompt": prompt if isinstance(prompt, str) else list(prompt), **params.parameters}
            for prompt, params in zip(several, settings, strict=True)
        ]
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        return self._run(COMPLETIONS, bodies, texts, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = True,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, in the shape of /v1/chat/completions, all with the same `tools`.

        For the other arguments see `generate`.

        Raises:
            ValueError: as `generate`.
        """
        several: Any = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        settings = _for_each(several, sampling_params, parameters)
        offered = {} if tools is None else {"tools": list(tools)}
        bodies = [
            {**params.of_chat(conversation), **offered} for conversation, params in zip(several, settings, strict=True)
        ]
        return self._run(CHAT_COMPLETIONS, bodies, [None] * len(bodies), use_tqdm=use_tqdm)

    def _prepared(self, endpoint: Endpoint[Any], body: dict[str, Any], name: str) -> Prepared:
        parsed = _parsed(endpoint.schema, {**body, "return_token_ids": True})
        try:
            return endpoint.prepare(parsed, self._service, self._engine.ready(), name)
        except ApiError as error:
            raise ValueError(str(error)) from None

    def _run(
        self,
        endpoint: Endpoint[Any],
        bodies: Sequence[dict[str, Any]],
        texts: Sequence[str | None],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        prepared = [self._prepared(endpoint, body, f"llm-{number}") for number, body in enumerate(bodies)]
        states = [state for request in prepared for state in request.states]
        whole = {state.request.request_id: OutputDelta(state.index) for state in states}
        self._finish({state.request.request_id: state for state in states}, whole, use_tqdm=use_tqdm)
        return [_output(request, text, whole) for request, text in zip(prepared, texts, strict=True)]

    def _finish(self, running: dict[str, RequestState], whole: Mapping[str, OutputDelta], *, use_tqdm: bool) -> None:
        """Run the engine until all requests have ended, and append their output to `whole`."""
        for state in running.values():
            self._engine.add(state.request)
        try:
            with tqdm(total=len(running), desc="generate", unit="choice", disable=None if use_tqdm else True) as bar:
                while running:
                    for delta in self._engine.step():
                        if delta.request_id not in running:
                            continue  # of an earlier call that failed
                        self._process(running[delta.request_id], delta, whole[delta.request_id])
                        if delta.finish_reason is not None:
                            del running[delta.request_id]
                            bar.set_postfix_str(f"{sum(len(output.token_ids) for output in whole.values())} tokens")
                            bar.update()
        finally:
            for name in running:  # after an error
                self._engine.abort(name)

    def _process(self, state: RequestState, delta: TokenDelta, whole: OutputDelta) -> None:
        was_stopped = state.is_stopped
        whole.extend(state.process(delta))
        try:
            state.raise_if_failed(delta)
        except ApiError as error:
            raise ValueError(str(error)) from None
        if state.is_stopped and not was_stopped and delta.finish_reason is None:
            self._engine.abort(delta.request_id)


def _output(prepared: Prepared, text: str | None, whole: Mapping[str, OutputDelta]) -> RequestOutput:
    scored, choices = prepared.body.num_logprobs is not None, []
    outputs = [whole[state.request.request_id] for state in prepared.states]
    for index, output in enumerate(prepared.best(outputs)):
        logprobs = [_scores(token) for token in output.tokens] if scored else None
        parts = output.text, output.token_ids, logprobs, output.finish_reason, output.reasoning, tool_calls_of(output)
        choices.append(CompletionOutput(index, *parts, output.stop_reason))
    first = prepared.states[0]
    metrics = SpeculativeMetrics.of(first.spec) if len(prepared.states) == 1 else None
    return RequestOutput(prepared.response_id, text, first.prompt.token_ids, choices, metrics)


def _scores(token: ScoredToken) -> dict[int, float]:
    chosen = {} if token.logprob is None else {token.token_id: token.logprob}
    return {**dict(token.top), **chosen}


def _parsed(schema: Any, values: dict[str, Any]) -> Any:
    try:
        return parse(schema, msgspec.json.encode(values))
    except ApiError as error:
        raise ValueError(str(error)) from None


def _text_or_ids(prompt: Any) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt  # type: ignore[no-any-return]
    values = [prompt[name] for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
    if len(values) != 1:
        raise ValueError(f"a prompt as a dict has either prompt or prompt_token_ids, not {sorted(prompt)}")
    return values[0]  # type: ignore[no-any-return]


def _is_ids(prompts: Any) -> bool:
    return len(prompts) > 0 and isinstance(prompts[0], int)


def _for_each(
    prompts: Sequence[Any], sampling_params: SamplingParams | Iterable[SamplingParams] | None, named: Mapping[str, Any]
) -> list[SamplingParams]:
    if named:
        if sampling_params is not None:
            raise ValueError(f"{next(iter(named))}: give it in sampling_params, or all parameters by name")
        sampling_params = SamplingParams(**named)
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * len(prompts)
    params = list(sampling_params)
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(params)} sampling_params; give one for all, or one for each")
    return params
