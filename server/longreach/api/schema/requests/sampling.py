"""Fields that all generating endpoints share: how tokens are drawn, when an answer ends, how a request is served."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainValidator

from longreach.api.schema.requests.attention_field import Attention
from longreach.api.schema.requests.document_field import DocumentField
from longreach.api.schema.requests.fields import (
    MAX_ALL_STOP_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_PROMPT_TOKENS,
    MAX_SPECULATE,
    MAX_STOPS,
    TOKEN_IDS_SCHEMA,
    LogitBias,
    Stops,
    StrictModel,
    described,
    invalid,
    neutral,
    only,
    or_default,
    strings,
    token_ids,
)
from longreach.engine.messages import Sampling

MAX_DEADLINE_MS = 24 * 60 * 60 * 1000


def _stop_token_ids(value: object) -> list[int]:
    ids = [] if value is None else token_ids(value)
    if len(ids) > MAX_STOPS:
        raise invalid(f"must have at most {MAX_STOPS} token ids")
    return ids


def _allowed_token_ids(value: object) -> list[int]:
    ids = [] if value is None else token_ids(value)
    if value is not None and not ids:
        raise invalid("must have at least one token id")
    if len(ids) > MAX_LOGIT_BIASES:
        raise invalid(f"must have at most {MAX_LOGIT_BIASES} token ids")
    return ids


def _bad_words(value: object) -> list[str]:
    words = [] if value is None else strings(value, "a list of strings")
    if len(words) > MAX_BAD_WORDS:
        raise invalid(f"must have at most {MAX_BAD_WORDS} words")
    for index, word in enumerate(words):
        if not word.strip(" "):
            raise invalid("must have a character that is no blank", at=index)
    if sum(map(len, words)) > MAX_ALL_STOP_CHARACTERS:
        raise invalid(f"the words must have at most {MAX_ALL_STOP_CHARACTERS} characters together")
    return words


# `flex` is served as such. The others buy a better place elsewhere, and are served as `default`.
_TIERS = (None, "auto", "default", "flex", "priority", "scale")
AskedTier = Annotated[
    Literal["default", "flex"] | None,
    only(*_TIERS),
    AfterValidator(lambda tier: tier if tier in (None, "flex") else "default"),
]

_MODELS_DEFAULT = "By default the model's, or else"

_BAD_WORDS_SCHEMA = {
    "type": ["array", "null"],
    "items": {"type": "string", "minLength": 1, "pattern": "[^ ]"},
    "maxItems": MAX_BAD_WORDS,
}
_ALLOWED_IDS_SCHEMA = {**TOKEN_IDS_SCHEMA, "type": ["array", "null"], "maxItems": MAX_LOGIT_BIASES}
_STOP_IDS_SCHEMA = {**TOKEN_IDS_SCHEMA, "type": ["array", "null"], "minItems": 0, "maxItems": MAX_STOPS}


Rope = Literal["auto", "native"] | Annotated[float, Field(ge=1, le=4096, allow_inf_nan=False)] | None


class ServingFields(DocumentField):
    """How one request is served: not what it answers, but when, and from which cache."""

    model: str = Field(min_length=1, max_length=256, description="A name of the served model.")
    stream: Annotated[bool, or_default(False)] = Field(False, description="Answer in server-sent events.")
    priority: Annotated[int, or_default(0)] = Field(
        0, ge=-100, le=100, description="A smaller number is read earlier; only with `--allow-priority`."
    )
    service_tier: AskedTier = Field(
        None,
        description=(
            "`flex`, for batches: read after all other prompts, and no step is kept short for its answer. All others "
            "are `default`."
        ),
        json_schema_extra={"enum": [*_TIERS]},
    )
    deadline_ms: int | None = Field(
        None,
        ge=1,
        le=MAX_DEADLINE_MS,
        description=(
            "Milliseconds from the request's arrival to its first token. What cannot be met is refused at once."
        ),
    )
    cache_salt: Annotated[str, or_default("")] = Field(
        "", max_length=256, description="Only requests with the same salt share cached prefixes."
    )
    return_cache_usage: Annotated[bool, or_default(False)] = Field(
        False,
        description="`usage.cache`: what came from which cache, and where the prompt parts from recent ones.",
    )
    return_places: Annotated[bool, or_default(False)] = Field(
        False,
        description=(
            "`usage.places`: of each sentence of the answer the places in the prompt that its tokens attended to most."
        ),
    )
    speculate: int | None = Field(
        None, ge=0, le=MAX_SPECULATE, description="Tokens that prompt lookup may draft a step; 0: none."
    )
    attention: Attention = Field(
        None, description="Which keys a query sees: a policy, or its short form (window:4096:4); the server's default."
    )
    rope: Rope = Field(
        None,
        description=(
            "RoPE's frequencies, with `--rope auto`: `auto` (the default) by the longest length that the request may "
            "come to, `native`, or a factor that `/v1/models` lists."
        ),
    )


class SamplingFields(ServingFields):
    """How each token is drawn, and what ends an answer. What has no default here has the model's, or else OpenAI's."""

    generation_config: Annotated[Literal["auto", "openai"], or_default("auto")] = Field(
        "auto",
        description=(
            "Sampling defaults of this request: auto (as `/v1/models` shows them) or openai (temperature 1, top_p 1, "
            "no limit)."
        ),
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        allow_inf_nan=False,
        description=f"0, as all below 1e-5, takes the likeliest token. {_MODELS_DEFAULT} 1.",
    )
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description=f"Draw from the smallest set of tokens with this probability. {_MODELS_DEFAULT} 1.",
    )
    top_k: int | None = Field(
        None,
        ge=-1,
        le=2**31 - 1,
        description=f"Draw from so many of the likeliest tokens; 0 or -1: no limit. {_MODELS_DEFAULT} 0.",
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description=f"Drop tokens with less than this part of the largest probability. {_MODELS_DEFAULT} 0.",
    )
    presence_penalty: Annotated[float, or_default(0.0)] = Field(
        0.0, ge=-2, le=2, allow_inf_nan=False, description="Taken from the logit of each token that was generated."
    )
    frequency_penalty: Annotated[float, or_default(0.0)] = Field(
        0.0, ge=-2, le=2, allow_inf_nan=False, description="The same, for each time that it was generated."
    )
    repetition_penalty: float | None = Field(
        None,
        ge=0.1,
        le=10,
        allow_inf_nan=False,
        description=(
            "Divides the positive logits of tokens in prompt and answer, and multiplies the negative ones. "
            f"{_MODELS_DEFAULT} 1."
        ),
    )
    logit_bias: LogitBias = Field({}, description="Added to the logits of these token ids.")
    allowed_token_ids: Annotated[list[int], PlainValidator(_allowed_token_ids), described(_ALLOWED_IDS_SCHEMA)] = Field(
        [], description="Draw from these tokens alone; one that ends the answer must be among them to do so."
    )
    bad_words: Annotated[list[str], PlainValidator(_bad_words), described(_BAD_WORDS_SCHEMA)] = Field(
        [], description="Draw no token that completes one of these words in the answer."
    )
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="The same seed, the same answer; choice i uses seed + i."
    )
    min_tokens: Annotated[int, or_default(0)] = Field(
        0, ge=0, le=MAX_PROMPT_TOKENS, description="Nothing ends the answer before it has so many tokens."
    )
    ignore_eos: Annotated[bool, or_default(False)] = Field(
        False, description="Go on after the model's end-of-sequence token."
    )
    stop: Stops = Field([], description="Strings that end the answer, of 4096 characters together at most.")
    stop_token_ids: Annotated[list[int], PlainValidator(_stop_token_ids), described(_STOP_IDS_SCHEMA)] = Field(
        [], description="Token ids that end the answer."
    )
    include_stop_str_in_output: Annotated[bool, or_default(False)] = Field(
        False, description="Leave the stop string, or the text of the stop token, in the answer."
    )

    skip_special_tokens: Annotated[bool, or_default(True)] = Field(
        True, description="False: special tokens of the answer are text."
    )

    def sampling(
        self, vocab_size: int, choice: int, defaults: Sampling, bad_words: list[list[int]] | None = None
    ) -> Sampling:
        """What the engine is told for one choice; `defaults` are those of the server, `bad_words` token ids.

        With `generation_config` "openai" the defaults of this request are OpenAI's.
        """
        if self.generation_config == "openai":
            defaults = Sampling()
        top_k = defaults.top_k if self.top_k is None else self.top_k
        penalty = self.repetition_penalty
        return Sampling(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=min(max(top_k, 0), vocab_size),
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=defaults.repetition_penalty if penalty is None else penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=bad_words or [],
            seed=None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63,
        )


class StreamOptions(StrictModel):
    """`stream_options`: what a stream tells beside the answer."""

    include_usage: Annotated[bool, or_default(False)] = Field(False, description="A last chunk has the usage.")
    continuous_usage_stats: Annotated[bool, or_default(False)] = Field(False, description="Each chunk has the usage.")
    progress_comments: Annotated[bool, or_default(False)] = Field(
        False, description="Keep-alives are comments with the progress, for people who read with curl."
    )
    include_obfuscation: Annotated[bool | None, only(None, False)] = neutral(None, False)


class ChoiceFields(StrictModel):
    """Several answers to one prompt, and what a stream tells beside them."""

    n: Annotated[int, or_default(1)] = Field(1, ge=1, le=MAX_CHOICES, description="Answers to each prompt.")
    stream_options: StreamOptions | None = None
    return_progress: Annotated[bool, or_default(False)] = Field(
        False, description="Send chunks with `prompt_progress` while the prompt is read."
    )
