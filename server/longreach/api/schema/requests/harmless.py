"""Fields that ask nothing of an answer: ONE table, which requests are checked by and the reference is made of.

A field of a request belongs to one of three classes.

- Honoured: a field of the request's model, with a meaning.
- Harmless: listed in `TABLE` as `Harmless`. Any value within its bounds is accepted, and no answer depends on it.
- Neutral: listed in `TABLE` as `Neutral`. Values that ask for nothing are accepted, all others are refused by name.

Any other field is refused, unless its value is null. A model takes its part of the table as a base class:

    class ChatRequest(SamplingFields, harmless("chat")): ...
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PlainValidator, StringConstraints, create_model

from longreach.api.schema.requests.fields import StrictModel, check_levels, described, invalid, only

Endpoint = Literal["chat", "completions", "responses", "messages", "count_tokens", "tokenize"]
_ALL: frozenset[Endpoint] = frozenset(get_args(Endpoint))
_ANSWERING: frozenset[Endpoint] = _ALL - {"tokenize", "count_tokens"}
_CHATS: frozenset[Endpoint] = _ANSWERING - {"completions"}
_OPENAI: frozenset[Endpoint] = frozenset({"chat", "completions", "responses"})
_TEXT: frozenset[Endpoint] = frozenset({"chat", "completions"})
_MESSAGES: frozenset[Endpoint] = frozenset({"messages"})
_PROMPTS: frozenset[Endpoint] = frozenset({"messages", "count_tokens"})

MAX_METADATA = 16
_MAX_FREE_MEMBERS = 64

Name = Annotated[str, StringConstraints(max_length=512)]
Names = Annotated[list[Name], Field(max_length=256)]
Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=MAX_METADATA),
]


def free_object(value: object) -> dict[str, Any]:
    """A JSON object of bounded depth and number of members."""
    if not isinstance(value, dict):
        raise invalid("must be an object", "invalid_type")
    if len(value) > _MAX_FREE_MEMBERS:
        raise invalid(f"must have at most {_MAX_FREE_MEMBERS} members")
    check_levels(value)
    return value


FreeObject = Annotated[
    dict[str, Any],
    PlainValidator(free_object),
    described({"type": "object", "maxProperties": _MAX_FREE_MEMBERS}),
]


@dataclass(frozen=True)
class Harmless:
    """A field of the type `kind` that no answer depends on; `use` says what becomes of it. Null is taken, too."""

    name: str
    kind: Any
    use: str
    endpoints: frozenset[Endpoint] = _OPENAI

    @property
    def definition(self) -> tuple[Any, Any]:
        """The field as `pydantic.create_model` takes it."""
        return self.kind | None, Field(None, description=self.use, json_schema_extra={"x-class": "harmless"})


@dataclass(frozen=True)
class Neutral:
    """A field that this server does not have, with the `values` beside null that ask for nothing of it."""

    name: str
    values: tuple[Any, ...] = ()
    endpoints: frozenset[Endpoint] = _TEXT
    allowed: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed", (None, *self.values))

    @property
    def definition(self) -> tuple[Any, Any]:
        """The field as `pydantic.create_model` takes it."""
        extra: Any = {"enum": [*self.allowed], "x-class": "neutral"}
        note = "Not supported: only what asks for nothing."
        return Annotated[Any, only(*self.allowed)], Field(None, description=note, json_schema_extra=extra)


_LOGGED = "Who asks, for the request log; of other characters than `A-Z a-z 0-9 . _ : / + = @ -` a digest."
_KEPT = "Nothing is kept."
_NOT_A_KEY = "Equal prefixes are found by themselves; only `cache_salt` keeps requests apart."

TABLE: tuple[Harmless | Neutral, ...] = (
    # OpenAI's.
    Harmless("user", Name, _LOGGED),
    Harmless("safety_identifier", Name, _LOGGED + " `user` goes before it."),
    Harmless("prompt_cache_key", Name, _NOT_A_KEY),
    Harmless(
        "prompt_cache_retention", Literal["in_memory", "in-memory", "24h"], "The cache keeps what it has room for."
    ),
    Harmless("metadata", Metadata, _KEPT, frozenset({"chat", "completions"})),
    Harmless("client_metadata", FreeObject, _KEPT),
    Harmless("store", bool, _KEPT, frozenset({"chat", "completions"})),
    Harmless("prediction", FreeObject, "A hint for speed; `speculate` drafts from the prompt.", frozenset({"chat"})),
    Neutral("conversation", (), frozenset({"responses"})),
    Neutral("context_management", ([],), frozenset({"responses"})),
    Neutral("moderation", (), frozenset({"responses"})),
    Neutral("modalities", (["text"],), frozenset({"chat", "completions"})),
    Neutral("functions", ([],)),
    Neutral("function_call", ("none", "auto")),
    Neutral("suffix", ("",), frozenset({"completions"})),
    # vLLM's.
    Neutral("use_beam_search", (False,)),
    Neutral("length_penalty", (1,)),
    Neutral("early_stopping", (False,)),
    Neutral("spaces_between_special_tokens", (True,)),
    Neutral("detokenize", (True,)),
    Neutral("logits_processors", ([],)),
    Neutral("echo", (False,), frozenset({"chat"})),
    Neutral("best_of", (1,), frozenset({"chat"})),
    Neutral("chat_template", (), frozenset({"chat", "tokenize"})),
    Neutral("media_io_kwargs", ({},), frozenset({"chat", "tokenize"})),
    Neutral("mm_processor_kwargs", ({},), frozenset({"chat", "tokenize"})),
    Neutral("truncation_side", ("left",)),
    Neutral("watermarking", (False,)),
    Neutral("kv_transfer_params", ({},)),
    Neutral("ec_transfer_params", ({},)),
    Neutral("vllm_xargs", ({},)),
    Neutral("return_prompt_text", (False,)),
    Neutral("return_token_offsets", (False,)),
    Neutral("routed_experts_prompt_start", (0,)),
    Harmless("guided_decoding_backend", Name, "Grammars are llguidance's, whichever is named.", _TEXT),
    Harmless("session_id", Name, _NOT_A_KEY, _TEXT),
    # SGLang's.
    Neutral("stream_reasoning", (True,)),
    Neutral("stop_regex", ([],)),
    Neutral("no_stop_trim", (False,)),
    Neutral("return_hidden_states", (False,)),
    Neutral("return_routed_experts", (False,)),
    Neutral("return_meta_info", (False,)),
    Neutral("return_cached_tokens_details", (False,)),
    Neutral("session_params", ({},)),
    Neutral("custom_params", ({},)),
    # llama.cpp's, at the values that switch a thing off.
    Harmless("cache_prompt", bool, "Prompts are cached by `--prefix-cache` and `cache_salt`.", _TEXT),
    Neutral("id_slot", (-1,)),
    Neutral("n_keep", (0,)),
    Neutral("samplers", ([],)),
    Neutral("mirostat", (0,)),
    Neutral("typical_p", (1,)),
    Neutral("repeat_penalty", (1,)),
    Neutral("xtc_probability", (0,)),
    Neutral("dry_multiplier", (0,)),
    Neutral("dynatemp_range", (0,)),
    Neutral("timings_per_token", (False,)),
    Neutral("post_sampling_probs", (False,)),
    Neutral("reasoning_format", ("auto",)),
    Neutral("parse_tool_calls", (True,)),
    # Anthropic's.
    Harmless("cache_control", FreeObject, "All prefixes are cached.", _PROMPTS),
    Harmless("anthropic_version", Name, "All versions are one here.", _PROMPTS),
    Harmless("anthropic_beta", Names, "What a beta adds is honoured or refused by its fields.", _PROMPTS),
    Harmless("betas", Names, "What a beta adds is honoured or refused by its fields.", _PROMPTS),
    Harmless("user_profile_id", Name, "Nobody is billed.", _PROMPTS),
    Harmless("diagnostics", FreeObject, "`cache_read_input_tokens` says what was cached.", _MESSAGES),
    Harmless("fallbacks", Any, "No answer is declined.", _MESSAGES),
    Neutral("mcp_servers", ([],), _PROMPTS),
    Neutral("speed", ("standard",), _PROMPTS),
    Neutral("compaction", (), _PROMPTS),
    Neutral("container", (), _MESSAGES),
    Neutral("fallback_credit_token", (), _MESSAGES),
    Neutral("inference_geo", ("global",), _MESSAGES),
    Neutral("billing_policy", (), _PROMPTS),
    # Other front-ends'.
    Neutral("extra_body", ({},)),
    Neutral("extra_headers", ({},)),
    Neutral("transforms", ([],)),
    Neutral("plugins", ([],)),
    Neutral("provider", ({},)),
    Neutral("models", ([],)),
    Neutral("usage", ({"include": False},)),
    Neutral("options", ({},)),
    Neutral("safe_prompt", (False,)),
    Neutral("tool_stream", (True,), frozenset({"chat"})),
    Harmless("chat_id", Name, _NOT_A_KEY, _TEXT),
)


@functools.cache
def harmless(endpoint: Endpoint) -> type[StrictModel]:
    """A base class with the harmless and neutral fields of an endpoint."""
    fields: dict[str, Any] = {entry.name: entry.definition for entry in TABLE if endpoint in entry.endpoints}
    return create_model(f"{endpoint.capitalize()}Harmless", __base__=StrictModel, __module__=__name__, **fields)


def asker(body: StrictModel) -> str | None:
    """Whom a request says that it is from, if it does."""
    names = (getattr(body, name, None) for name in ("user", "safety_identifier"))
    return next((name for name in names if name), None)
