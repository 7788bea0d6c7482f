"""Most option sections, and the rules between sections. Descriptions are the text of --help."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from eagle_server.algorithms import ALGORITHMS, NGRAM, NONE, UNNAMED
from eagle_server.config.base import (
    ConfigError,
    Count,
    HubGGUF,
    ModelLocation,
    Seconds,
    Section,
    Text,
    WeightsLocation,
    comma_separated,
    gguf_file,
    gguf_name,
    hub_gguf,
    local_file,
    proxy_address,
)
from eagle_server.config.device import DeviceSection
from eagle_server.config.kv_events import KVEventsConfig, parsed
from eagle_server.config.observability import ObservabilitySection
from eagle_server.config.speculative import SpeculativeSection

_DEMO = Path(__file__).parents[1] / "assets" / "demo"
DEMO_TARGET = _DEMO / "target"
DEMO_DRAFT = _DEMO / UNNAMED.demo


class ModelSection(Section):
    """The model to serve."""

    model_path: WeightsLocation | None = Field(
        default=None,
        description="the target: a Hugging Face id, a local directory or a GGUF file (on Hugging Face "
        "owner/name:Q4_K_M or owner/name:FILE.gguf); default: the embedded demo; architectures that this package "
        "does not implement run on transformers' code",
    )
    tokenizer_path: ModelLocation | None = Field(
        default=None, description="Hugging Face id or directory of the tokenizer; default: the target's"
    )
    served_model_name: Text | None = Field(
        default=None, description="model name in the API; default: the id, or the name of the directory"
    )
    chat_template: Annotated[str, AfterValidator(local_file)] | None = Field(
        default=None, description="file with a Jinja chat template; default: the model's own, or a built-in one"
    )
    generation_config: Text = Field(
        default="auto",
        description="temperature, top_p, top_k, min_p and repetition_penalty where a request is silent; auto: those of "
        "the model's generation_config.json; none: temperature 1 and no limits; or a directory with such a file",
    )
    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "pythonic",
        "mistral",
        "mistral_v13",
        "granite",
        "deepseek_v3",
        "deepseek_v31",
        "gpt_oss",
    ] = Field(
        default="auto",
        description="format in which the model writes tool calls, which chats with tools return as tool_calls; auto: "
        "recognized from the chat template, none if unknown; none: calls stay in the content",
    )
    reasoning_parser: Literal["auto", "none", "deepseek-r1", "qwen3", "mistral", "granite", "gpt_oss"] = Field(
        default="auto",
        description="how the model writes its thinking, which chats return as reasoning_content; grammars apply "
        "after it; auto: recognized from the chat template, none if unknown; none: thinking stays in the content",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="data type of weights and KV; auto: the checkpoint's, but bfloat16 for "
        "float32 on a GPU that FlashInfer can serve it on",
    )
    quantization: Literal["int8", "int4", "fp8"] | None = Field(
        default=None,
        description="round the weights of linear layers, of target and draft, to 8 or 4 bits while loading: int8 or "
        "int4 on a CPU, fp8 or int4 on a GPU. int4 keeps 8 bits for an lm_head; "
        "native kernels round inputs to 8 bits, and GPUs those of more than 64 rows with fp8",
    )
    quantization_cache: Path | None = Field(
        default=None,
        description="directory that keeps the target's rounded weights: later starts map them into memory, which takes "
        "a second, and servers of one machine share them; files are never removed",
    )
    context_length: Count | None = Field(
        default=None, description="maximum tokens per request, prompt and output together; default: the model's"
    )


class CacheSection(Section):
    """The KV cache."""

    page_size: Count = Field(default=1, description="tokens per KV page")
    max_total_tokens: Count | None = Field(
        default=None, description="KV slots in total; default: enough for all running requests, limited by memory"
    )
    disable_radix_cache: bool = Field(
        default=False, description="do not reuse KV between requests with the same prefix"
    )
    kv_events_config: Annotated[KVEventsConfig, BeforeValidator(parsed)] | None = Field(
        default=None,
        description="a JSON object as vLLM takes it: publish over ZeroMQ which blocks of tokens are cached, for "
        "routers that choose a server by prefix; the events contain the prompts; default: off",
    )

    @property
    def published_events(self) -> KVEventsConfig | None:
        """Where to publish events; None: nowhere."""
        config = self.kv_events_config
        return config if config is not None and config.publishes else None

    @model_validator(mode="after")
    def _events_need_a_cache(self) -> Self:
        if self.published_events is not None and self.disable_radix_cache:
            raise ConfigError("--kv-events-config: with --disable-radix-cache nothing is cached; drop one of them")
        return self


class SchedulerSection(Section):
    """How requests are scheduled."""

    max_running_requests: Count = Field(default=48, description="maximum requests that decode at once; others wait")
    chunked_prefill_size: Count = Field(
        default=512, description="maximum prompt tokens per cycle; longer prompts are split into chunks"
    )


class ServerSection(Section):
    """The HTTP server."""

    host: Text = Field(default="127.0.0.1", description="address to listen on; all: 0.0.0.0 for IPv4, :: for both")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(default=30000, description="port to listen on")
    uds: Text | None = Field(
        default=None,
        description="listen on a Unix socket at this path instead of host and port; who may connect follows from the "
        "umask, with the usual 022 only the user who starts the server",
    )
    url_file: Text | None = Field(
        default=None,
        description="file to which the server writes its URL on this machine as soon as it listens, for "
        "python -m eagle_server.api.health, the health check of the images",
    )
    api_key: Annotated[SecretStr, Field(min_length=1)] | None = Field(
        default=None,
        description="bearer token that clients must send; better set in the environment, because ps shows flags",
    )
    api_key_file: Annotated[str, AfterValidator(local_file)] | None = Field(
        default=None, description="file with more such keys, one a line; lines that begin with # are skipped"
    )
    ssl_certfile: Annotated[str, AfterValidator(local_file)] | None = Field(
        default=None, description="certificate (PEM, with its chain): the server speaks HTTPS"
    )
    ssl_keyfile: Annotated[str, AfterValidator(local_file)] | None = Field(
        default=None, description="its private key; default: in the certificate's file"
    )
    ssl_keyfile_password: Annotated[SecretStr, Field(min_length=1)] | None = Field(
        default=None, description="password of the private key; better set in the environment"
    )
    sse_keep_alive: Annotated[float, Field(ge=0)] = Field(
        default=15.0,
        description="seconds without an event after which a stream sends a comment, so that proxies keep it; it also "
        "begins the response, so that later errors come as events; 0: never",
    )
    max_queue_size: Count = Field(
        default=1024,
        description="maximum sequences that wait for their first token; further ones get status 429, and "
        "so do those of a client that waits with seven times as many as have room",
    )
    max_concurrent_requests_per_key: Count | None = Field(
        default=None,
        description="maximum generating requests of an API key at once; further ones get status 429; without keys, of "
        "all clients together; default: any number",
    )
    tokens_per_minute_per_key: Count | None = Field(
        default=None,
        description="tokens, of prompts and outputs, that an API key may use in a minute before its further requests "
        "get status 429; running ones are not cut; without keys, of all clients together; default: any number",
    )
    request_timeout: Seconds | None = Field(
        default=None, description="maximum seconds per request; a request's own timeout can only be shorter"
    )
    strict_max_tokens: bool = Field(
        default=False,
        description="refuse a max_tokens that does not fit beside the prompt with status 400, instead of lowering it "
        "to what fits; /v1/messages always lowers it",
    )
    watchdog_timeout: Seconds = Field(
        default=300.0,
        description="seconds after which an engine that has work but sends nothing is killed and restarted",
    )
    cors_allow_origins: Annotated[tuple[Text, ...], BeforeValidator(comma_separated)] = Field(
        default=(), description="origins whose pages may call this server (CORS), comma-separated; *: all"
    )
    allowed_hosts: Annotated[tuple[Text, ...], BeforeValidator(comma_separated)] = Field(
        default=(),
        description="host names that clients may use for this server, comma-separated; *.example.com: all below "
        "example.com; *: all; default: all, or only this machine's own names if --host is a loopback address",
    )
    forwarded_allow_ips: Annotated[
        tuple[Annotated[str, AfterValidator(proxy_address)], ...], BeforeValidator(comma_separated)
    ] = Field(
        default=(),
        description="proxies whose X-Forwarded-For says who the client is, comma-separated: addresses, networks like "
        "10.0.0.0/8, or unix for those that connect with --uds; default: none, a client is its connection's address",
    )
    record_rows_dir: Text | None = Field(
        default=None,
        description="directory for finished answers with their prompts, as token rows that eagle-server train reads "
        "(--data DIR/rows-*.jsonl): a head trained on the traffic drafts more of it; only this user can read them; "
        'requests with "store": false are left out; default: nothing is written',
    )
    record_rows_gb: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] = Field(
        default=10.0,
        description="most gigabytes of all files in --record-rows-dir: the oldest are removed; 6 to 9 bytes a token",
    )
    record_rows_keys: Annotated[tuple[Text, ...], BeforeValidator(comma_separated)] = Field(
        default=(),
        description="names of API keys whose answers are recorded, comma-separated, as in --api-key-file; api-key is "
        "that of --api-key; default: all answers are",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest severity that is logged"
    )

    @model_validator(mode="after")
    def _certificate_first(self) -> ServerSection:
        for name in ("ssl_keyfile", "ssl_keyfile_password"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile: without it nothing is encrypted")
        return self

    @model_validator(mode="after")
    def _rows_need_a_directory(self) -> ServerSection:
        for name in ("record_rows_gb", "record_rows_keys"):
            if name in self.model_fields_set and self.record_rows_dir is None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --record-rows-dir: without it nothing is recorded")
        if self.record_rows_keys and self.api_key is None and self.api_key_file is None:
            raise ConfigError("--record-rows-keys needs --api-key or --api-key-file: without them no key has a name")
        return self


class Config(BaseModel):
    """All options. None means that the value follows from the checkpoint or the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSection = Field(default_factory=ModelSection)
    device: DeviceSection = Field(default_factory=DeviceSection)
    speculative: SpeculativeSection = Field(default_factory=SpeculativeSection)
    cache: CacheSection = Field(default_factory=CacheSection)
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection)
    server: ServerSection = Field(default_factory=ServerSection)
    observability: ObservabilitySection = Field(default_factory=ObservabilitySection)

    @property
    def speculates(self) -> bool:
        """Whether anything is drafted."""
        algorithm, draft = self.speculative.algorithm, self.speculative.draft_model_path
        needs_none = algorithm == NGRAM or self.speculative.drafts.stored == "in the target"
        has_draft = self.model.model_path is None or draft is not None or needs_none
        return has_draft and algorithm != NONE

    @property
    def target_path(self) -> str:
        """Hugging Face id or directory of the target."""
        return self.model.model_path or str(DEMO_TARGET)

    @property
    def draft_path(self) -> str | None:
        """Hugging Face id or directory of the draft, None if no model drafts."""
        if not self.speculates or self.speculative.algorithm == NGRAM:
            return None
        row = self.speculative.drafts
        if row.stored == "in the target":
            return self.speculative.draft_model_path or self.target_path
        return self.speculative.draft_model_path or str(_DEMO / row.demo)

    @property
    def served_model_name(self) -> str:
        """The model's name in the API; it never shows a path of this machine."""
        path = self.model.model_path
        if self.model.served_model_name or path is None:
            return self.model.served_model_name or "demo"
        if isinstance(file := self.gguf, Path):
            return gguf_name(file)
        return Path(path).resolve().name if Path(path).is_dir() else path

    @property
    def gguf(self) -> Path | HubGGUF | None:
        """The GGUF file that holds the target; None: another format does."""
        return _in_gguf(self.model.model_path)

    @property
    def draft_gguf(self) -> Path | HubGGUF | None:
        """The GGUF file that holds the draft; None: another format does, or the target's files."""
        return _in_gguf(self.speculative.draft_model_path)

    def public_dict(self) -> dict[str, Any]:
        """JSON-ready values for logs and /v1/server_info, completed without loading models; never the API key."""
        values = self.model_dump(mode="json")
        values["model"].update(model_path=self.target_path, served_model_name=self.served_model_name)
        tree = self.speculative.given_tree_options()
        values["speculative"].update(asdict(tree) if tree else {}, draft_model_path=self.draft_path)
        if self.speculative.posterior is not None:
            threshold, alpha = self.speculative.posterior
            values["speculative"].update(typical_posterior_threshold=threshold, typical_posterior_alpha=alpha)
        for name in ("api_key", "ssl_keyfile_password"):
            values["server"][name] = None if getattr(self.server, name) is None else "(set)"
        return values

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        target, draft = self.model.model_path, self.speculative.draft_model_path
        row = self.speculative.drafts
        if draft is not None and target is None:
            raise ConfigError(
                "--speculative-draft-model-path needs --model-path: without it the demo is served with its own draft"
            )
        flag = f"--speculative-algorithm {self.speculative.head_algorithm}"
        if row.stored == "in the target" and target is None:
            raise ConfigError(f"{flag} needs --model-path: the demo's target does not hold {row.holds}")
        if row.is_model and draft is None:
            raise ConfigError(
                f"{flag} needs --model-path and, for the smaller model that drafts, --speculative-draft-model-path"
            )
        same = draft is not None and target is not None and Path(draft).resolve() == Path(target).resolve()
        if same and row.stored == "alone" and not row.is_model:
            raise ConfigError(
                f"--speculative-draft-model-path {draft}: should differ from --model-path, which is no {row.name} head"
            )
        if self.model.quantization_cache is not None and self.model.quantization in (None, "fp8"):
            raise ConfigError("--quantization-cache needs --quantization int8 or int4: nothing else is kept")
        if not self.speculates:
            self._refuse_speculative_options()
        return self

    def _refuse_speculative_options(self) -> None:
        values = self.speculative.model_dump(exclude={"algorithm"}, exclude_defaults=True)
        flags = [f"--speculative-{field.replace('_', '-')}" for field in values]
        algorithm = self.speculative.algorithm
        if algorithm == NONE and flags:
            raise ConfigError(f"{flags[0]} has no effect with --speculative-algorithm NONE: drop one of them")
        if algorithm != NONE and (algorithm or flags):
            needy = f"--speculative-algorithm {algorithm}" if algorithm else flags[0]
            inside = next(row for row in ALGORITHMS.values() if row.stored == "in the target")
            raise ConfigError(
                f"{needy} needs --speculative-draft-model-path, or a target with {inside.holds} and "
                f"--speculative-algorithm {inside.name}"
            )


def _in_gguf(path: str | None) -> Path | HubGGUF | None:
    return None if path is None else gguf_file(Path(path).expanduser()) or hub_gguf(path)
