"""From checked fields to the engine's requests: prompts that fit, ids that exist, one for each answer."""

from __future__ import annotations

import hashlib
import uuid
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longreach.api.generation.answer_places import check_places
from longreach.api.generation.choose_rope import context_of, factor_of, rope_table
from longreach.api.generation.compare_prompts import PromptText, asker_of, compare_prompts
from longreach.api.generation.deadlines import check_deadline, deadline_of
from longreach.api.generation.predict import Prediction, predict
from longreach.api.generation.text_stream import PlannedAnswer
from longreach.api.schema.requests.sampling import SamplingFields
from longreach.api.service.call import Call
from longreach.config import Settings
from longreach.engine.admission import Place, most_queued_tokens
from longreach.engine.errors import QueueFullError
from longreach.engine.messages import Generate, Started
from longreach.engine.rope_choice import contents_key
from longreach.errors import ContextLengthError, InvalidRequestError
from longreach.policies.values import AttentionPolicy
from longreach.text.stop import Stops

# Beyond this, a prompt's log-probabilities are told in a stream alone, piece by piece, so that none has to be kept.
_MAX_WHOLE_SCORED = 65536
# Tokens of prompts that one object tells again, in all its answers.
_MAX_TOLD_AGAIN = 4 << 20


def check_token_ids(ids: Sequence[int], info: Started, param: str) -> None:
    """Raise an InvalidRequestError if there is a token id beyond the vocabulary."""
    if ids and max(ids) >= info.vocab_size:
        raise InvalidRequestError(
            f"`{param}`: token ids must be less than the vocabulary's size, {info.vocab_size}.",
            param=param,
            code="invalid_value",
        )


def check_fit(prompt: Sequence[int], max_tokens: int, info: Started, param: str) -> None:
    """Raise an InvalidRequestError if prompt and answer do not fit into the context, or there is no prompt."""
    if not prompt:
        raise InvalidRequestError(f"`{param}`: there is no token in it.", param=param, code="invalid_value")
    if len(prompt) + max_tokens > info.max_model_len:
        raise ContextLengthError(len(prompt), max_tokens, info.max_model_len, param=param)


def check_scored(top: int | None, prompts: Sequence[Sequence[int]], param: str, copies: int = 1) -> None:
    """Raise an InvalidRequestError if more tokens of prompts are to be scored than one object may tell of.

    `top` is None where none are, and each prompt's are told `copies` times.
    """
    scored = copies * sum(map(len, prompts))
    if top is not None and scored > _MAX_WHOLE_SCORED:
        raise InvalidRequestError(
            f"`{param}`: those of more than {_MAX_WHOLE_SCORED} prompt tokens, counted for each of `n` answers, are "
            "only sent with `stream: true`, by `echo` and `logprobs` of /v1/completions.",
            param=param,
            code="invalid_value",
        )


def check_told_again(fields: Sequence[str], prompts: Sequence[Sequence[int]], copies: int) -> None:
    """Raise an InvalidRequestError if one object tells too much of prompts that `fields` have told, `copies` times."""
    tokens = copies * sum(map(len, prompts))
    if fields and tokens > _MAX_TOLD_AGAIN:
        raise InvalidRequestError(
            f"`n`: with `{fields[0]}` {tokens} tokens of prompts would be told again, counted for each of `n` answers; "
            f"one object tells {_MAX_TOLD_AGAIN}. Send `stream: true`, or ask for fewer answers.",
            param="n",
            code="invalid_value",
        )


def tokens_left(call: Call[Any], prompt: Sequence[int], limit: int | None, param: str) -> int:
    """Tokens that an answer may have: `limit`, or what the context of the request's rotary table has left.

    Raises:
        ContextLengthError: it has none left.
        InvalidRequestError: as `rope_table`.
    """
    most = call.engine.info.max_model_len
    if len(prompt) >= most:
        raise ContextLengthError(len(prompt), limit or 1, most, param=param)
    return context_of(call, prompt, None, param) - len(prompt) if limit is None else limit


@dataclass(frozen=True, kw_only=True)
class AnswerSpec:
    """What an endpoint makes of its body: the prompts, and what their answers have to be.

    Attributes:
        prompts: token ids of each prompt.
        texts: what they were made of, as far as that is known and wanted.
        param: the field that the prompts come from.
        max_tokens: tokens that an answer may have; with 0, only the prompts are scored; None for what is left.
        choices: answers to each prompt.
        stops: strings that end an answer, beside those of the body.
        grammar: the grammar that answers follow, in llguidance's form.
        grammar_field: the field that the grammar comes from.
        logprobs: likeliest tokens that are told at each place of an answer; None for no log-probabilities.
        prompt_logprobs: the same, of the prompts.
        special: special tokens are text, also where the body does not ask for them.
        bad_words: token ids of the words that an answer must not have.
        scores_end: the token that only ends an answer is among its log-probabilities, as in OpenAI's completions.
    """

    prompts: Sequence[list[int]]
    param: str
    max_tokens: int | None
    choices: int = 1
    stops: Sequence[str] = ()
    grammar: str | None = None
    grammar_field: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    special: bool = False
    bad_words: Sequence[list[int]] = ()
    scores_end: bool = False
    texts: Sequence[PromptText | None] = ()


async def plan_answers(call: Call[SamplingFields], answer_id: str, spec: AnswerSpec) -> list[PlannedAnswer]:
    """The answers to each prompt, those to one prompt next to each other.

    Each has its place in the engine's queue from here on, before anything of the answer is sent. A caller that finds no
    room is told so by the status. The places are given back when the request ends. Answers to equal prompts share one
    prompt. Before that the prompts are compared with recent ones, if the caller asks for that.

    Raises:
        InvalidRequestError: one does not fit, names a token that does not exist, or asks for what this server was not
            started with.
        DeadlineRefusedError: the first token cannot come in time.
        QueueFullError: too much is waiting.
        ClientGoneError: the caller went away.
    """
    attention = checked_attention(call, spec)
    factors = [factor_of(call, prompt, spec.max_tokens, spec.param) for prompt in spec.prompts]
    call.record.stretched(max(factors))
    if call.body.return_places:
        call.record.wants_places()
    await compare_prompts(call, contents_key(attention, factors[0]), spec.prompts, spec.texts)
    if call.body.deadline_ms is not None:
        check_deadline(call, await predicted(call, spec))
    planned = _planned(call, answer_id, spec, attention)
    _take_places(call, planned, spec, attention)
    return _kept(call, planned)


async def predicted(call: Call[SamplingFields], spec: AnswerSpec) -> Prediction:
    """What the answers would get if they were planned now.

    Raises:
        EngineDeadError, ClientGoneError: as `predict`.
    """
    readers = _readers(spec.prompts, apart=spec.prompt_logprobs is not None)
    contexts = [context_of(call, prompt, spec.max_tokens, spec.param) for prompt in spec.prompts]
    left = max(context - len(prompt) for context, prompt in zip(contexts, spec.prompts, strict=True))
    most = left if spec.max_tokens is None else max(spec.max_tokens, 1)
    factors = [factor_of(call, prompt, spec.max_tokens, spec.param) for prompt in spec.prompts]
    return await predict(call, spec.prompts, readers, factors, max_tokens=most, choices=spec.choices)


def has_room(call: Call[SamplingFields], spec: AnswerSpec) -> bool:
    """Whether the answers would find places in the engine's queue now."""
    planned = _planned(call, f"estimate-{uuid.uuid4().hex}", spec, call.attention)
    places = _places(call, planned, spec)
    try:
        call.engine.admit(places, call.attention, call.record.caller)
    except QueueFullError:
        return False
    call.engine.release(places)
    return True


def _kept(call: Call[SamplingFields], planned: Sequence[PlannedAnswer]) -> list[PlannedAnswer]:
    """The same; later prompts are compared with these."""
    if not call.service.settings.prefix_cache:
        return [*planned]
    recent = call.service.recent_prompts

    def kept(one: PlannedAnswer) -> PlannedAnswer:
        return replace(one, recent=recent.keep(asker_of(call, one.request.contents_key), one.request.prompt))

    return [kept(one) if one.leads else one for one in planned]


def checked_attention(call: Call[SamplingFields], spec: AnswerSpec) -> AttentionPolicy:
    """The attention policy of a call, all of whose fields are checked against the server."""
    body, info, settings = call.body, call.engine.info, call.service.settings
    answers = len(spec.prompts) * spec.choices
    if answers > settings.max_queued_requests:  # more than can ever wait: coming again would not help
        raise InvalidRequestError(
            f"`{spec.param}`: {answers} answers are asked for at once; this server lets "
            f"{settings.max_queued_requests} requests wait.",
            param=spec.param,
            code="invalid_value",
        )
    if body.priority and not settings.allow_priority:
        raise InvalidRequestError(
            "`priority`: this server treats all requests alike; it has to be started with --allow-priority. Send "
            "`service_tier: flex` for what may come after all others.",
            param="priority",
            code="unsupported_value",
        )
    check_token_ids(body.stop_token_ids, info, "stop_token_ids")
    check_token_ids([*body.logit_bias], info, "logit_bias")
    for prompt in spec.prompts:
        check_fit(prompt, max(spec.max_tokens or 0, 1), info, spec.param)
        rope_table(call, prompt, spec.max_tokens, spec.param)
    _check_drawable(body, spec, info)
    attention = call.attention
    check_bounds(attention, info)
    if body.return_places:
        check_places(info, attention, several_gpus=settings.tensor_parallel_size * settings.context_parallel_size > 1)
    return attention


def _ends(body: SamplingFields, info: Started) -> list[int]:
    """The tokens that end an answer."""
    return [*body.stop_token_ids, *([] if body.ignore_eos else info.eos_token_ids)]


def _check_drawable(body: SamplingFields, spec: AnswerSpec, info: Started) -> None:
    """Refuse what may leave no token to be drawn."""
    check_token_ids(body.allowed_token_ids, info, "allowed_token_ids")
    asked = [name for name in ("allowed_token_ids", "bad_words") if getattr(body, name)]
    if not asked:
        return
    if spec.grammar is not None:
        why = f"cannot be set where a grammar (`{spec.grammar_field}`) says what may be drawn"
    elif len(asked) > 1:
        why = "cannot be set together with `bad_words`"
    elif body.min_tokens and body.allowed_token_ids and {*body.allowed_token_ids} <= {*_ends(body, info)}:
        why = "all of these end the answer, which `min_tokens` does not let end"
    else:
        return
    raise InvalidRequestError(f"`{asked[0]}`: {why}.", param=asked[0], code="invalid_value")


def _planned(
    call: Call[SamplingFields], answer_id: str, spec: AnswerSpec, attention: AttentionPolicy
) -> list[PlannedAnswer]:
    body, info, service = call.body, call.engine.info, call.service
    ends, bad_words = _ends(body, info), [*spec.bad_words]
    strings = [*body.stop, *spec.stops]
    stops = Stops(strings, call.tokenizer.special_ids(strings))

    def request(number: int, choice: int) -> Generate:
        prompt = spec.prompts[number]
        left = context_of(call, prompt, spec.max_tokens, spec.param) - len(prompt)
        return Generate(
            request_id=f"{answer_id}-{number * spec.choices + choice}",
            prompt=prompt,
            max_tokens=left if spec.max_tokens is None else max(spec.max_tokens, 1),
            min_tokens=body.min_tokens,
            stop_token_ids=ends,
            sampling=body.sampling(info.vocab_size, choice, service.sampling_defaults, bad_words),
            priority=body.priority,
            flexible=body.service_tier == "flex",
            cache_salt=call.cache_salt,
            speculate=service.settings.speculate if body.speculate is None else body.speculate,
            grammar=spec.grammar,
            logprobs=spec.logprobs,
            prompt_logprobs=spec.prompt_logprobs if choice == 0 else None,
            attention=attention,
            caller=call.record.caller,
            rope_factor=factor_of(call, prompt, spec.max_tokens, spec.param),
            places=body.return_places,
        )

    return [
        PlannedAnswer(
            request(number, choice),
            stops=stops,
            include_stop=body.include_stop_str_in_output,
            stop_token_ids=body.stop_token_ids,
            special=spec.special or not body.skip_special_tokens,
            prompt_only=spec.max_tokens == 0,
            leads=choice == 0,
            due=deadline_of(call),
            grammar_field=spec.grammar_field,
            scores_end=spec.scores_end,
            number=number * spec.choices + choice,
            source=spec.texts[number] if spec.texts else None,
        )
        for number in range(len(spec.prompts))
        for choice in range(spec.choices)
    ]


def _take_places(
    call: Call[SamplingFields], planned: Sequence[PlannedAnswer], spec: AnswerSpec, attention: AttentionPolicy
) -> None:
    """Take a place for each answer, or raise; the end of the HTTP request gives them back."""
    places = _places(call, planned, spec)
    call.engine.admit(places, attention, call.record.caller)
    call.record.at_end.callback(call.engine.release, places)


def _places(call: Call[SamplingFields], planned: Sequence[PlannedAnswer], spec: AnswerSpec) -> dict[str, Place]:
    """The place that each answer wants.

    Raises:
        InvalidRequestError: they can never all wait.
    """
    readers = _readers(spec.prompts, apart=spec.prompt_logprobs is not None)
    places: dict[str, Place] = {}
    for number, answer in enumerate(planned):
        reader = planned[readers[number // spec.choices] * spec.choices]
        copied = None if reader is answer else reader.request.request_id
        places[answer.request.request_id] = Place(len(answer.request.prompt), copied)
    _check_tokens(places, call.service.settings, call.engine.info, spec.param)
    return places


def check_bounds(attention: AttentionPolicy, info: Started) -> None:
    """Raise an InvalidRequestError if a policy needs bounds of keys, and the engine keeps none."""
    param = "attention.decode_budget"
    try:
        attention.check_bounds(info.page_bounds)
    except ValueError as error:
        raise InvalidRequestError(f"`{param}`: {error}.", param=param, code="invalid_value") from None


def _readers(prompts: Sequence[Sequence[int]], *, apart: bool) -> list[int]:
    """Of each prompt, the number of the first one that equals it; with `apart` its own, for prompts that are scored:
    each of those is computed."""
    if apart:
        return [*range(len(prompts))]
    lengths = Counter(map(len, prompts))
    first: dict[int | bytes, int] = {}
    readers = []
    for number, prompt in enumerate(prompts):
        # Digests, since prompts that differ in their last token alone would take long to compare in pairs.
        same = number if lengths[len(prompt)] == 1 else hashlib.sha256(array("i", prompt)).digest()
        readers.append(first.setdefault(same, number))
    return readers


def _check_tokens(places: Mapping[str, Place], settings: Settings, info: Started, param: str) -> None:
    """Refuse prompts that can never wait together. One alone can always wait, however long it is."""
    read = [place.prompt_tokens for place in places.values() if place.copy_of is None or not settings.prefix_cache]
    most = most_queued_tokens(settings.max_queued_tokens, info.kv_tokens)
    if len(read) > 1 and sum(read) > most:
        raise InvalidRequestError(
            f"`{param}`: {len(read)} prompts with {sum(read)} tokens are to be read at once; this server lets {most} "
            "tokens wait (--max-queued-tokens). Ask for fewer in one request.",
            param=param,
            code="invalid_value",
        )
