"""From checked fields to what the engine is asked: prompts that fit, ids that exist, one request for each answer."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

from longreach.api.generation.text_stream import Ask
from longreach.api.http.request_log import RequestRecord
from longreach.api.schema.requests.sampling import SamplingFields
from longreach.api.service.metered_engine import MeteredEngine
from longreach.api.service.service import Service
from longreach.config import Settings
from longreach.engine.admission import Place, most_queued_tokens
from longreach.engine.messages import Generate, Started
from longreach.errors import ContextLengthError, InvalidRequestError
from longreach.policies.values import AttentionPolicy
from longreach.text.stop import Stops


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


def tokens_left(prompt: Sequence[int], limit: int | None, info: Started, param: str) -> int:
    """Tokens that an answer may have: `limit`, or what the context has left.

    Raises:
        ContextLengthError: it has none left.
    """
    if len(prompt) >= info.max_model_len:
        raise ContextLengthError(len(prompt), limit or 1, info.max_model_len, param=param)
    return info.max_model_len - len(prompt) if limit is None else limit


def make_asks(
    asked: SamplingFields,
    prompts: Sequence[list[int]],
    *,
    param: str,
    answer_id: str,
    engine: MeteredEngine,
    service: Service,
    record: RequestRecord,
    max_tokens: int,
    choices: int = 1,
    stops: Sequence[str] = (),
    grammar: str | None = None,
    grammar_field: str | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    special: bool = False,
) -> list[Ask]:
    """`choices` answers to each prompt, those to one prompt next to each other; with 0 `max_tokens`, only scores.

    Each has its place in the engine's queue from here on, before anything of the answer is sent: who finds no room is
    told so by the status. The places end with the request at the latest. Answers to equal prompts share one prompt.

    Raises:
        InvalidRequestError: one does not fit, names a token that does not exist, or asks for what this server was not
            started with.
        QueueFullError: too much is waiting.
    """
    info, answers = engine.info, len(prompts) * choices
    if answers > service.settings.max_queued_requests:  # more than can ever wait: coming again would not help
        raise InvalidRequestError(
            f"`{param}`: {answers} answers are asked for at once; this server lets "
            f"{service.settings.max_queued_requests} requests wait.",
            param=param,
            code="invalid_value",
        )
    if asked.priority and not service.settings.allow_priority:
        raise InvalidRequestError(
            "`priority`: this server treats all requests alike; it has to be started with --allow-priority. Send "
            "`service_tier: flex` for what may come after all others.",
            param="priority",
            code="unsupported_value",
        )
    check_token_ids(asked.stop_token_ids, info, "stop_token_ids")
    check_token_ids([*asked.logit_bias], info, "logit_bias")
    for prompt in prompts:
        check_fit(prompt, max(max_tokens, 1), info, param)
    ends = [*asked.stop_token_ids, *([] if asked.ignore_eos else info.eos_token_ids)]
    speculate = service.settings.speculate if asked.speculate is None else asked.speculate
    attention = service.settings.default_policy if asked.attention is None else asked.attention.resolve()
    _check_bounds(attention, info)
    prepared = Stops([*asked.stop, *stops])
    asks = [
        Ask(
            Generate(
                request_id=f"{answer_id}-{number * choices + choice}",
                prompt=prompt,
                max_tokens=max(max_tokens, 1),
                min_tokens=asked.min_tokens,
                stop_token_ids=ends,
                sampling=asked.sampling(info.vocab_size, choice, service.sampling_defaults),
                priority=asked.priority,
                flexible=asked.service_tier == "flex",
                cache_salt=record.cache_salt(asked.cache_salt),
                speculate=speculate,
                grammar=grammar,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs if choice == 0 else None,
                attention=attention,
                caller=record.caller,
            ),
            stops=prepared,
            include_stop=asked.include_stop_str_in_output,
            stop_token_ids=asked.stop_token_ids,
            special=special,
            prompt_only=max_tokens == 0,
            leads=choice == 0,
            grammar_field=grammar_field,
        )
        for number, prompt in enumerate(prompts)
        for choice in range(choices)
    ]
    readers = _readers(prompts, apart=prompt_logprobs is not None)
    places: dict[str, Place] = {}
    for number, ask in enumerate(asks):
        reader = asks[readers[number // choices] * choices]
        copied = None if reader is ask else reader.request.request_id
        places[ask.request.request_id] = Place(len(ask.request.prompt), copied)
    _check_tokens(places, service.settings, info, param)
    engine.admit(places, attention, record.caller)
    record.at_end.callback(engine.release, places)
    return asks


def _check_bounds(attention: AttentionPolicy, info: Started) -> None:
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
