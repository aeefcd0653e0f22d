"""What the completion endpoints answer: OpenAI's objects, once for the wire and for the schema.

A member that is `UNSET` is left out; `service_tier` is there where the request names one. `prompt_progress` is ours,
`reasoning_content` vLLM's and DeepSeek's.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]
ServiceTier = Literal["default", "flex"]


class CachedTokens(msgspec.Struct, frozen=True):
    """How many of the prompt's tokens were not computed for this request."""

    cached_tokens: int


class KeptMass(msgspec.Struct, frozen=True):
    """What part of the dense softmax's mass lies on the keys that were seen, on a sample of the prompt's queries in all
    heads of the layers that the policy changes, exactly: mean, 5th percentile, least."""

    queries: int
    mean: float
    p5: float
    min: float


class MissedMass(msgspec.Struct, frozen=True):
    """An upper bound of the part of the dense softmax's mass that lies on keys that were not read: its mean over
    tokens, query heads and layers, and its greatest."""

    mean: float
    max: float


class AnswerKeptMass(msgspec.Struct, frozen=True):
    """What part of the dense softmax's mass lies on the keys that were read, on a sample of the answer's tokens in all
    heads of the layers where keys are chosen, exactly: mean, least."""

    tokens: int
    mean: float
    min: float


class DecodeUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What those tokens of the answers have read that had more keys than their `decode_budget`, in the layers where
    keys are chosen.

    There are `tokens` of them. Keys are summed over tokens, layers and KV heads; `kv_bytes_saved` are those of the keys
    that were skipped, less those of the bounds by which keys are chosen. `missed_mass` is known for every token; the
    `kept_mass` is measured on one token in 64, and null if there was none.
    """

    tokens: int
    keys_visited: int
    keys_skipped: int
    kv_bytes_saved: int
    missed_mass: MissedMass
    kept_mass: AnswerKeptMass | None


class AttentionUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy that is not dense left out of the prompt, beside dense attention in all heads of all layers.

    `density` is of pairs of a query and a key; under `dynamic`, whose tiles may be of another size, of tiles.

    `parameters` are those that took effect. Tiles are of 128 x 128 pairs; the FLOPs and the bytes of keys and values
    are those of the tiles that were skipped. What came from the cache is not counted. `decode` is there with a
    `decode_budget`, and says of the answers what the rest says of the prompt.
    """

    policy: str
    parameters: dict[str, int | float | bool | str | list[int]]
    density: float
    tiles_visited: int
    tiles_skipped: int
    flops_saved: int
    kv_bytes_saved: int
    kept_mass: KeptMass | None
    decode: DecodeUsage | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    """Tokens of the prompts and of all answers, and what a sparse attention policy left out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    attention: AttentionUsage | UnsetType = UNSET


class PromptProgress(msgspec.Struct, frozen=True):
    """How far the prompt has been read: tokens of all, of those from the cache, of those done, and milliseconds.

    `eta_ms` is the predicted time to the first token if nobody else's prompt is read, null before there is a basis.
    """

    total: int
    cache: int
    processed: int
    time_ms: int
    eta_ms: int | None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Tokens as text, where in the text they begin, their log-probabilities, and the likeliest at each place."""

    tokens: list[str]
    text_offset: list[int]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/completions`, whole or a chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: ServiceTier | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """A token, its bytes, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the answer, and the likeliest at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the answer's tokens, in the order they were drawn."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """A function's name and its arguments, a JSON object in a string; in a chunk, a piece of it."""

    arguments: str
    name: str | UnsetType = UNSET


class ChatToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a function; in a chunk with the call's `index`, and with id and type in the first of each call."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one message."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: ServiceTier | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: ServiceTier | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True):
    """A served model; `max_model_len` is the context that really fits, prompt and answer.

    `description` says what the embedded model can do, in a line for people; of other models it is None.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    description: str | None


class ModelList(msgspec.Struct, frozen=True):
    """All served models."""

    object: Literal["list"]
    data: list[Model]


class Status(msgspec.Struct, frozen=True):
    """Where the server is in its life."""

    status: Literal["loading", "ready", "stalled", "restarting", "draining", "dead"]


class Version(msgspec.Struct, frozen=True):
    """The server's version."""

    version: str


class PolicyParameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter of an attention policy; the bounds of a list are those of its members."""

    type: str
    values: list[str] | UnsetType = UNSET
    minimum: float | int | UnsetType = UNSET
    maximum: float | int | UnsetType = UNSET
    default: int | float | bool | str | list[int] | None
    description: str


class PolicyInfo(msgspec.Struct, frozen=True):
    """An attention policy."""

    policy: str
    description: str
    parameters: dict[str, PolicyParameter]


class AttentionPolicies(msgspec.Struct, frozen=True):
    """All policies that a request may name, and the one of requests that name none."""

    object: Literal["list"]
    data: list[PolicyInfo]
    default: str


class MaskPicture(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy sees of a prompt: shares of pairs and of tiles (`block` x `block`) that causal attention has.

    `grid` has a row for each stretch of queries and in it a number for each stretch of keys: the share of visible pairs
    there, 0 to 100. `exact` says whether all tiles were counted, or a sample.
    """

    policy: str
    parameters: dict[str, int | float | bool | str | list[int]]
    length: int
    block: int
    exact: bool
    density: float
    tiles_visited: int
    tiles_total: int
    flops_saved_share: float
    grid: list[list[int]]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, how many, and how many could be."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """A text."""

    prompt: str


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field. The last four come with `context_length_exceeded`."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_at_least: int | UnsetType = UNSET
    n_prompt_tokens_estimate: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    """Every refusal and failure."""

    error: ErrorObject
