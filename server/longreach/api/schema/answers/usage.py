"""What all answers tell: why they ended, the tokens that they took, what a policy left out, how far a prompt is.

A member that is `UNSET` is left out. `prompt_progress` is ours.
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


class PartedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt is first another than the nearest of the caller's recent ones.

    `token` counts its tokens, `character` is the offset in its text. In a chat `message` is the number of the message,
    the system prompt or the instructions counted first, and `field` is `content`, `reasoning_content`, `tool_calls` or
    `tools`; in `template`, what the chat template has written before that message, or behind the last one (null). Where
    the template changes its texts, `message` and `field` are null. `now` and `before` are a few characters of this
    prompt and of the other one around that place; `before` ends where the other prompt and its answer do. It is null
    for a caller without a key and without a `cache_salt`, but for one on the server's own machine.
    """

    token: int
    character: int
    message: int | None
    role: str | None
    field: Literal["content", "reasoning_content", "tool_calls", "tools", "template", "prompt", "document"] | None
    now: str
    before: str | None


class CacheUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Of the prompts' tokens, those that were not computed: in the GPU's pages, or brought back from host memory or
    disk.

    So many first tokens of the first prompt are `seen` in the nearest of the caller's recent prompts and its answer.
    What is seen and not cached was evicted, is not in a full page, or was read under another engine. `parted` is null
    where the whole prompt is seen, and where there is no recent prompt.
    """

    cached_tokens: int
    gpu: int
    host: int
    disk: int
    seen: int
    parted: PartedPrompt | None


class AnswerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the prompt that a sentence of an answer attended to.

    `start` and `end` are characters of the prompt's text. In a chat `message` is the number of the message, as in
    `cache.parted`, and `field` is `content`, `reasoning_content`, `tool_calls` or `tools`; in a kept document it is
    `document`, and `document` is its id. The place begins `offset` characters into the text of that field, or into the
    document. Where the template changes its texts, these are null. `text` has 200 characters at most. `weight` is the
    share of the sentence's scores that the place has.
    """

    start: int
    end: int
    message: int | None
    role: str | None
    field: Literal["content", "reasoning_content", "tool_calls", "tools", "template", "prompt", "document"] | None
    document: str | None
    offset: int | None
    text: str
    weight: float


class SentencePlaces(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence of the answer with the number `choice`, and at most three places in its prompt that it attended to,
    the best first, each with a twentieth of its scores or more. Attention is no proof: a place is where the model
    looked, not what the sentence follows from."""

    choice: int
    sentence: str
    places: list[AnswerPlace]


class KeptMass(msgspec.Struct, frozen=True):
    """What part of the dense softmax's mass lies on the keys that were seen, on a sample of the prompt's queries in all
    heads of the layers that the policy changes, exactly: mean, 5th percentile, least."""

    queries: int
    mean: float
    p5: float
    min: float


class ReadAgain(msgspec.Struct, frozen=True):
    """Rows that read more than was chosen, to keep `min_mass`: `widened` ones a greater share of the estimate, `dense`
    ones everything; `share` is that of both."""

    widened: int
    dense: int
    share: float


class DrawnMass(msgspec.Struct, frozen=True):
    """The least mass that a drawn query of a row keeps in any head: `mean` over rows and `min`, of what was read, and
    `chosen_min` of what had been chosen at first."""

    mean: float
    min: float
    chosen_min: float


class QueriesBelow(msgspec.Struct, frozen=True):
    """Share of the queries that keep less than `min_mass` all the same: an estimate, and what it is at most, with a
    probability of `confidence`."""

    estimate: float
    at_most: float
    confidence: float


class Guarantee(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured under a `min_mass`, exactly, before anything was read.

    A row is a tile of queries, a KV head and a layer in which something could be left out. Of each tile
    `drawn_queries` were measured against all keys. `queries_below` is a statement about all queries of the rows.
    """

    min_mass: float
    rows: int
    drawn_queries: int
    drawn_mass: DrawnMass
    read_again: ReadAgain
    queries_below: QueriesBelow


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
    `kept_mass` is measured on one token in 64, and null if there was none. `read_again` is the share of tokens and
    layers that read all keys, since the bound of what a budget missed was above 1 - `min_mass`.
    """

    tokens: int
    keys_visited: int
    keys_skipped: int
    kv_bytes_saved: int
    missed_mass: MissedMass
    kept_mass: AnswerKeptMass | None
    read_again: float = 0.0


class PolicyLayers(msgspec.Struct, frozen=True):
    """How many of the model's layers the policy changes, in the prompt or the answer, and how many are of each kind:
    `full` ones see everything, those of `window` have a window of their own, those of `state` keep no keys at all."""

    changed: int
    full: int
    window: int
    state: int


class AttentionUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy that is not dense left out of the prompt, beside dense attention in all heads of the layers that
    see everything, and of those with windows that the policy narrows.

    `density` is of pairs of a query and a key; under `dynamic`, whose tiles may be of another size, of tiles.

    `parameters` are those that took effect. Tiles are of 128 x 128 pairs; the FLOPs and the bytes of keys and values
    are those of the tiles that were skipped. What came from the cache is not counted. `decode` is there with a
    `decode_budget`, and says of the answers what the rest says of the prompt; `guarantee` with a `min_mass`.
    `tiles_unchosen` is there where tiles are chosen: those of `tiles_visited` in parts of the prompt and layers that
    were computed densely, since choosing was not worth what it costs.
    """

    policy: str
    parameters: dict[str, int | float | bool | str | list[int]]
    layers: PolicyLayers
    density: float
    tiles_visited: int
    tiles_skipped: int
    flops_saved: int
    kv_bytes_saved: int
    kept_mass: KeptMass | None
    guarantee: Guarantee | UnsetType = UNSET
    tiles_unchosen: int | UnsetType = UNSET
    decode: DecodeUsage | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    """Tokens of the prompts and of all answers, and what a sparse attention policy left out; with `return_cache_usage`
    what was cached, with `return_places` what of the prompts the answers attended to. With `--rope auto`, `rope_factor`
    is that of the rotary frequencies; 1 for the native ones."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    attention: AttentionUsage | UnsetType = UNSET
    cache: CacheUsage | UnsetType = UNSET
    rope_factor: float | UnsetType = UNSET
    places: list[SentencePlaces] | UnsetType = UNSET


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token's log-probability at a place of the prompt, its place among the likeliest (null beyond those that were
    asked for), and its text."""

    logprob: float
    rank: int | None
    decoded_token: str


# One for each token of the prompt, by token ids; the first token has none.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class PromptProgress(msgspec.Struct, frozen=True):
    """How far the prompt has been read: tokens of all, of those from the cache, of those done, and milliseconds.

    `eta_ms` is the predicted time to the first token if nobody else's prompt is read, null before there is a basis.
    """

    total: int
    cache: int
    processed: int
    time_ms: int
    eta_ms: int | None
