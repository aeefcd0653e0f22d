"""Every setting of the server: its type, its bounds, its default and its meaning, in one place.

A setting `max_model_len` is the flag `--max-model-len` and the environment variable `LONGREACH_MAX_MODEL_LEN`; the flag
wins. `longreach.cli` makes its options from these fields; `longreach.setting_values` reads and checks their values.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from longreach.engine.disk.needs import check_disk
from longreach.engine.messages import EngineConfig
from longreach.errors import ConfigError, quoted
from longreach.policies.values import AttentionPolicy
from longreach.setting_values import (
    Bytes,
    Milliseconds,
    Real,
    Tokens,
    Whole,
    check_call_format,
    check_chat_template,
    check_hosts,
    check_names,
    check_overrides,
    check_policy,
    check_revision,
    check_rope_scaling,
    check_tokenizer,
    is_loopback,
    layer_numbers,
    model_problem,
    or_auto,
    parse_policy,
    parse_rope_scaling,
    power_of_two,
)
from longreach.util.log_lines import LogFormat

ENV_PREFIX = "LONGREACH_"
_OF_TESTS = "LONGREACH_TEST_"  # what the tests of this project are told, and servers that they start inherit
EMBEDDED_MODEL = Path(__file__).parent / "default_model"
EMBEDDED_MODEL_NAME = "longreach-default"
EMBEDDED_MODEL_DESCRIPTION = (
    "This is the demonstration model of 8M parameters. It finds facts that are stated in a sentence; to most other "
    "questions it says 'Not stated.', even where the text has the answer. Serve your own: longreach serve MODEL"
)

# Two names of RoPE's parameters in config.json.
_ROPE_NAMES = ("rope_scaling", "rope_parameters")
_ORIGIN = r"https?://[A-Za-z0-9.\-\[\]:]{1,253}"
_ORIGINS = rf"^(\*|{_ORIGIN}(,{_ORIGIN}){{0,31}})$"
# Text has about four bytes a token, as JSON escapes up to six a byte; token ids have up to nine.
_BODY_BYTES_PER_TOKEN = 64
_LEAST_BODY_BYTES = 4 * 2**20
_PDF_BYTES = 64 * 2**20  # most of a PDF are its fonts and pictures, so its text does not say how long it is


class Settings(BaseSettings):
    """The settings of one server, checked, frozen and resolved; see `load_settings`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    model: str | None = Field(
        None, description="Directory, hub id or GGUF file of the model; without one, the embedded model."
    )
    served_model_name: Annotated[str, AfterValidator(check_names)] | None = Field(
        None, description="Names that requests use, with commas; by default the hub id or the directory's name."
    )
    revision: Annotated[str, AfterValidator(check_revision)] | None = Field(
        None, description="Branch, tag or commit of a hub id; by default the newest commit of its main branch."
    )
    tokenizer: Annotated[str, AfterValidator(check_tokenizer)] | None = Field(
        None, description="Directory or hub id of another tokenizer than the model's, with its chat template."
    )
    chat_template: Annotated[str, AfterValidator(check_chat_template)] | None = Field(
        None, description="Jinja template of chats instead of the model's: a file, or the template itself."
    )
    tool_call_format: Annotated[str, AfterValidator(check_call_format)] | None = Field(
        None, description="How the model writes calls of tools, by name; by default as its chat template shows."
    )
    hf_overrides: Annotated[str, BeforeValidator(check_overrides)] = Field(
        "{}", description="Values instead of those in the model's config.json, as JSON; objects are merged key by key."
    )
    rope_scaling: Annotated[str, BeforeValidator(check_rope_scaling)] | None = Field(
        None,
        description="Scaling of RoPE instead of the config's: yarn:FACTOR:ORIGINAL, dynamic:FACTOR, none, or JSON.",
    )
    rope: Literal["static", "auto"] = Field(
        "static",
        description="RoPE of a model that is scaled: static, for all alike, or auto, by the length of each request.",
    )
    generation_config: Literal["auto", "openai"] = Field(
        "auto", description="Sampling defaults: auto (the model's generation_config.json) or openai (temperature 1)."
    )
    host: str = Field("127.0.0.1", min_length=1, max_length=255, description="Address to listen on.")
    port: Whole = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: str | None = Field(
        None,
        repr=False,
        description="Keys that requests need, with commas: KEY or NAME:KEY. Others can read flags: use the variable.",
    )
    api_key_file: Path | None = Field(None, description="File with such keys, one a line; # begins a comment.")
    allow_unauthenticated: bool = Field(
        False, description="Listen beyond this machine although anybody who reaches the port may then use the server."
    )
    ssl_certfile: Path | None = Field(None, description="Certificate chain (PEM); with it the server speaks HTTPS.")
    ssl_keyfile: Path | None = Field(None, description="The certificate's private key, if it is in another file.")
    allowed_origins: Annotated[str, Field(pattern=_ORIGINS)] | None = Field(
        None, description="Web pages that may use the server from a browser: https://a.example, with commas, or *."
    )
    allowed_hosts: Annotated[str, AfterValidator(check_hosts)] | None = Field(
        None, description="Names that requests may have in Host: api.example, *.example, with commas, or * for any."
    )
    playground: bool = Field(True, description="Serve the playground, a page at / on which to ask the model.")
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,2})?)$")] = Field(
        "auto", description="Where the model runs: auto, cpu, cuda or cuda:N."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights: auto, float32, bfloat16 or float16."
    )
    quantization: Literal["fp8", "fp8_blocks"] | None = Field(
        None,
        description="Make 16-bit weights FP8 ones at load: fp8 (a scale a channel) or fp8_blocks (one for 128x128).",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="Type of the KV cache: auto (16 bits, or fp8 where a checkpoint has scales) or fp8, half the size.",
    )
    attention_backend: Literal["auto", "cpu", "triton", "hopper", "reference"] = Field(
        "auto", description="Attention kernels: auto, cpu, triton, hopper or reference."
    )
    attention: Annotated[str, BeforeValidator(check_policy)] = Field(
        "dense", description="Attention policy of requests that name none: dense, window:4096:4, or as JSON."
    )
    attention_dense_layers: Annotated[tuple[int, ...], NoDecode, BeforeValidator(layer_numbers)] = Field(
        (), description="Layers that no policy touches: 0,1,-1 (-1 is the last), counted among layers that attend."
    )
    tensor_parallel_size: Whole = Field(
        1, ge=1, le=64, description="GPUs that compute the model together, each a part of its heads and weights."
    )
    context_parallel_size: Whole = Field(
        1,
        ge=1,
        le=64,
        description="Copies of the model that split the tokens of long steps. GPUs: this times --tensor-parallel-size.",
    )
    max_model_len: Annotated[Tokens | None, BeforeValidator(or_auto)] = Field(
        None, ge=16, le=2**24, description="Tokens of prompt and answer together: 32768, 128k, 1M, or auto."
    )
    max_num_seqs: Whole = Field(64, ge=1, le=1024, description="Requests computed at once.")
    max_batched_tokens: Annotated[Tokens | None, BeforeValidator(or_auto)] = Field(
        None,
        ge=16,
        le=2**20,
        description="Token budget of one engine step, or auto: 8192 on a GPU, or 16384 where steps unpack weights.",
    )
    max_itl: Milliseconds = Field(
        50,
        ge=1,
        le=60_000,
        description="Longest delay between an answer's tokens that reading prompts may cause: 50ms.",
    )
    allow_priority: bool = Field(
        False, description="Let requests name a `priority`; any caller may then have its prompts read before others'."
    )
    max_queued_requests: Whole = Field(256, ge=1, le=65536, description="Requests that may wait; more get a 429.")
    max_queued_tokens: Annotated[Tokens | None, BeforeValidator(or_auto)] = Field(
        None, ge=1, le=2**36, description="Prompt tokens that may wait, or auto: four times what the KV cache holds."
    )
    prefix_cache: bool = Field(
        True, description="Keep the KV pages of earlier prompts for later ones that begin alike."
    )
    resume_seconds: Real = Field(
        60.0, ge=0, le=86400, description="How long a cancelled request's pages are kept before others, for its retry."
    )
    speculate: Whole = Field(
        0, ge=0, le=32, description="Tokens that prompt lookup drafts a step for requests that do not say; 0: none."
    )
    page_size: Annotated[Whole, AfterValidator(power_of_two)] = Field(
        128, ge=16, le=256, description="Tokens in a KV page; a power of two. 128 suits the GPU kernels' key tiles."
    )
    page_bounds: bool = Field(
        False, description="Keep bounds of the keys beside KV pages, for requests with a `decode_budget`."
    )
    kv_cache_memory: Annotated[Bytes | None, BeforeValidator(or_auto)] = Field(
        None, ge=2**20, le=2**44, description="Memory for KV pages on each device: 4GiB, a number of bytes, or auto."
    )
    kv_offload_bytes: Bytes = Field(
        0,
        ge=0,
        le=2**44,
        description="Host memory for evicted KV pages and states: 64GiB or a number of bytes; 0 drops them.",
    )
    kv_disk: Path | None = Field(None, description="Folder that keeps KV pages and states on disk, also over restarts.")
    kv_disk_bytes: Bytes = Field(
        0, ge=0, le=2**50, description="What that folder may take, for all GPUs together: 200GiB or a number of bytes."
    )
    state_cache_bytes: Annotated[Bytes | None, BeforeValidator(or_auto)] = Field(
        None, ge=0, le=2**44, description="Memory on each device for copies of recurrent states: 2GiB, auto; 0: none."
    )
    gpu_memory_utilization: Real = Field(
        0.9, gt=0, le=1, description="Fraction of the GPU's memory that weights, workspace and KV pages may take."
    )
    cuda_graphs: bool = Field(
        True,
        description="Run decode-only steps, and short chunks of prompts, on a GPU as CUDA graphs, if layers allow.",
    )
    batch_invariant: bool = Field(
        False,
        description="Give a request the same bits whatever else is computed; one GPU, and no model with experts.",
    )
    random_weights: bool = Field(False, description="Build the model from config.json alone; for benchmarks.")
    silence_timeout: Real = Field(
        30.0, ge=1, le=3600, description="Seconds without a sign of life after which an engine process is replaced."
    )
    step_timeout: Real = Field(
        600.0, ge=1, le=86400, description="Seconds in one step after which an engine process is replaced."
    )
    max_engine_restarts: Whole = Field(
        3, ge=0, le=100, description="Engine processes that may die one after the other before the server gives up."
    )
    keep_alive_seconds: Real = Field(
        5.0, ge=0.01, le=300, description="A stream that is silent for so long gets a line of one blank, or a comment."
    )
    detached_seconds: Real = Field(
        600.0,
        ge=0,
        le=86400,
        description="How long a request with an Idempotency-Key goes on without its caller, and its answer is held.",
    )
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = Field(
        "reasoning_content",
        description="Where chats tell reasoning: reasoning_content, reasoning (vLLM's newer name), or both.",
    )
    max_body_bytes: Annotated[Bytes | None, BeforeValidator(or_auto)] = Field(
        None, ge=1024, le=2**30, description="Longest request body: 32MiB, a number of bytes, or auto: 64 a token."
    )
    max_encoding_bytes: Bytes = Field(
        64 * 2**20, ge=1024, le=2**40, description="Text that may wait to be tokenized: 64MiB or a number of bytes."
    )
    max_total_body_bytes: Bytes = Field(
        512 * 2**20, ge=1024, le=2**40, description="Bodies of all open requests together: 512MiB or a number of bytes."
    )
    max_connections: Whole = Field(
        1024, ge=1, le=65536, description="Connections that may be open, beside a few for probes."
    )
    max_header_bytes: Bytes = Field(
        32 * 2**10, ge=1024, le=2**20, description="Longest request line with its headers: 32KiB or a number of bytes."
    )
    header_timeout: Real = Field(
        10.0, ge=0.01, le=3600, description="Seconds that a TLS handshake with a request's headers may take to arrive."
    )
    body_timeout: Real = Field(
        120.0, ge=0.01, le=3600, description="Seconds that a body may take to arrive; of an upload, each further KiB."
    )
    write_timeout: Real = Field(
        60.0, ge=0.01, le=3600, description="Seconds after which a reader that does not read is disconnected."
    )
    max_grammar_bytes: Bytes = Field(
        64 * 2**10, ge=64, le=2**24, description="Longest JSON schema, regular expression or grammar of a request."
    )
    max_grammar_seconds: Whole = Field(
        1, ge=1, le=60, description="Longest processor time that one of these may take to compile."
    )
    shutdown_grace_seconds: Real = Field(
        30.0, ge=0, le=3600, description="At SIGTERM or SIGINT, how long open requests may go on."
    )
    handover: bool = Field(
        False,
        description="Start while another server still has the files of --kv-disk and the stores, and wait for its end.",
    )
    responses_store: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        "memory",
        description="Where answers of /v1/responses are kept: memory, none, or a file that outlives the server.",
    )
    responses_store_bytes: Bytes = Field(
        256 * 2**20, ge=2**20, le=2**44, description="Bytes of kept responses; those not used for longest are dropped."
    )
    responses_store_days: Real = Field(
        30.0, gt=0, le=36500, description="Days after its last use for which a response is kept."
    )
    documents: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        "memory",
        description="Where documents of /v1/documents are kept: memory, none, or a file that outlives the server.",
    )
    documents_bytes: Bytes = Field(
        2**30, ge=2**20, le=2**44, description="Bytes of kept documents; unpinned ones make room, least used first."
    )
    documents_bytes_per_key: Annotated[Bytes | None, BeforeValidator(or_auto)] = Field(
        None, ge=2**16, le=2**44, description="Bytes of documents that one key may keep, or auto: all of them."
    )
    documents_per_key: Whole = Field(1000, ge=1, le=2**20, description="Documents that one key may keep.")
    documents_days: Real = Field(
        30.0, gt=0, le=36500, description="Days after its last use for which a document is kept, if it says nothing."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged: debug, info, warning or error."
    )
    log_format: LogFormat = Field("text", description="Lines of the log: text, or json, one object a line.")

    @model_validator(mode="after")
    def _check_exposure(self) -> Settings:
        needs_key = self.api_key is not None or self.api_key_file is not None
        if not needs_key and not self.allow_unauthenticated and not is_loopback(self.host):
            raise PydanticCustomError(
                "exposed",
                "--host: {host} can be reached from other machines and the server asks for no key; "
                "set LONGREACH_API_KEY or --api-key-file, use 127.0.0.1, or add --allow-unauthenticated if the network "
                "is trusted",
                {"host": quoted(self.host)},
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise PydanticCustomError("tls", "--ssl-keyfile: give the certificate, too, with --ssl-certfile")
        return self

    @model_validator(mode="after")
    def _check_model(self) -> Settings:
        problem = model_problem(self.model, EMBEDDED_MODEL)
        if problem is not None:
            raise PydanticCustomError("model", "{problem}", {"problem": problem})
        if self.revision is not None and (path := Path(self.model_source)).exists():
            what = "directory" if path.is_dir() else "file"
            raise PydanticCustomError("revision", f"--revision: MODEL is a {what}; only hub ids have revisions")
        return self

    @model_validator(mode="after")
    def _check_backend(self) -> Settings:
        if self.attention_backend == "hopper" and self.device == "cpu":
            raise PydanticCustomError(
                "backend",
                "--attention-backend: hopper needs a Hopper GPU, and --device is cpu; use auto or cpu",
            )
        return self

    @model_validator(mode="after")
    def _check_disk(self) -> Settings:
        try:
            check_disk(self.kv_disk, self.kv_disk_bytes, self.kv_offload_bytes)
        except ValueError as error:
            raise PydanticCustomError("disk", "{problem}", {"problem": str(error)}) from None
        return self

    @model_validator(mode="after")
    def _check_rope(self) -> Settings:
        twice = [name for name in _ROPE_NAMES if name in orjson.loads(self.hf_overrides)]
        if self.rope_scaling is not None and twice:
            raise PydanticCustomError(
                "rope",
                "--rope-scaling: --hf-overrides has {name}, too, which is the same thing; give one of the two",
                {"name": twice[0]},
            )
        return self

    @model_validator(mode="after")
    def _check_bounds(self) -> Settings:
        try:
            self.default_policy.check_bounds(self.page_bounds)
        except ValueError as error:
            raise PydanticCustomError("bounds", "--attention: {problem}", {"problem": str(error)}) from None
        return self

    @property
    def model_source(self) -> str:
        """The directory or hub id that the model is loaded from."""
        return str(EMBEDDED_MODEL) if self.model is None else self.model

    @property
    def name(self) -> str:
        """The model's first name: that of metrics and of the log."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model that requests may use."""
        if self.served_model_name is not None:
            return tuple(self.served_model_name.split(","))
        if self.model is None:
            return (EMBEDDED_MODEL_NAME,)
        path = Path(self.model).resolve()
        return (path.name if path.is_dir() else path.stem if path.is_file() else self.model,)

    @property
    def description(self) -> str | None:
        """What the served model is and is not, in a line for whoever asks it; None of others than the embedded one."""
        return EMBEDDED_MODEL_DESCRIPTION if self.model is None else None

    @property
    def default_policy(self) -> AttentionPolicy:
        """The attention policy of requests that name none."""
        return parse_policy(self.attention)

    @property
    def overrides(self) -> dict[str, Any]:
        """What replaces values of the model's config.json."""
        overrides: dict[str, Any] = orjson.loads(self.hf_overrides)
        if self.rope_scaling is not None:
            overrides[_ROPE_NAMES[0]] = parse_rope_scaling(self.rope_scaling)
        return overrides

    def body_limit(self, max_model_len: int | None) -> int:
        """Bytes of the longest body: as set, or what the longest prompt can need of a model of this length, in tokens.
        Where that is not known, what a prompt of a million tokens can need."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return max(_BODY_BYTES_PER_TOKEN * (max_model_len or 2**20), _LEAST_BODY_BYTES)

    def file_limit(self, max_model_len: int | None) -> int:
        """Bytes of the longest PDF: as set, or 64 MiB, or what a text may have."""
        least = 0 if self.max_body_bytes is not None else _PDF_BYTES
        return max(self.body_limit(max_model_len), least)

    def engine_config(self) -> EngineConfig:
        """What the engine process is told."""
        return EngineConfig(
            model=self.model_source,
            revision=self.revision,
            hf_overrides=self.overrides,
            log_format=self.log_format,
            rope_by_request=self.rope == "auto",
            device=self.device,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            attention_backend=self.attention_backend,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            page_size=self.page_size,
            page_bounds=self.page_bounds,
            kv_cache_bytes=self.kv_cache_memory,
            kv_offload_bytes=self.kv_offload_bytes,
            kv_disk=None if self.kv_disk is None else str(self.kv_disk.absolute()),
            kv_disk_bytes=self.kv_disk_bytes,
            handover=self.handover,
            state_cache_bytes=self.state_cache_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            cuda_graphs=self.cuda_graphs,
            random_weights=self.random_weights,
            max_itl=self.max_itl / 1000,
            prefix_cache=self.prefix_cache,
            resume_seconds=self.resume_seconds,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            attention_dense_layers=[*self.attention_dense_layers],
            silence_timeout=self.silence_timeout,
            step_timeout=self.step_timeout,
            tensor_parallel_size=self.tensor_parallel_size,
            context_parallel_size=self.context_parallel_size,
            batch_invariant=self.batch_invariant,
        )


def load_settings(**flags: Any) -> Settings:
    """Settings from flags (those that are not None), then the environment, then the defaults.

    Raises:
        ConfigError: a value is wrong; one line per setting, naming flag or variable, and the fix.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem, given) for problem in error.errors())) from None


def unknown_variables() -> list[str]:
    """Environment variables that look like ours and set nothing: most often a slip of the pen."""
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    known.add("LONGREACH_DEBUG")  # the kernels read it: longreach_kernels.debug
    ours = (name for name in os.environ if name.startswith(ENV_PREFIX) and not name.startswith(_OF_TESTS))
    return sorted(name for name in ours if name not in known)


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def _explain(problem: Any, given: dict[str, Any]) -> str:
    message = problem["msg"]
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"{flag(name)}: there is no such setting"
    if problem["type"] == "string_pattern_mismatch":
        message = f"not a valid value ({Settings.model_fields[name].description})"
    source = flag(name) if name in given else f"{flag(name)} (from {variable(name)})"
    if str(problem["input"]).startswith("tcp://") and name not in given:
        message += "; Kubernetes sets this for a service called longreach: set enableServiceLinks to false"
    if name == "api_key":
        return f"{source}: {message[0].lower()}{message[1:]}"
    return f"{source}: {message[0].lower()}{message[1:]}, got {quoted(problem['input'])}"
