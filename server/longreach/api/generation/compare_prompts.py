"""Why a prompt was not cached: where it parts from the caller's recent ones, in tokens, characters and messages."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.api.http.request_log import ComparedPrompt
from longreach.api.schema.answers.usage import PartedPrompt
from longreach.api.service.call import Call
from longreach.api.service.recent_prompts import Asker, Nearest, nearest
from longreach.setting_values import is_loopback
from longreach.text.prompt_places import Place, Span, place_at
from longreach.text.token_places import TokenPlaces
from longreach.text.tokenizer import Tokenizer

# Tokens before and behind the place that are looked at: a character has at most four. And characters that are told.
_TOKENS_BEFORE, _TOKENS_BEHIND = 8, 64
_CHARACTERS_BEFORE, _CHARACTERS_BEHIND = 16, 24
_TOKENS_A_STEP = 4096
# What a proxy adds to a request: the address is then the proxy's, for all who are behind it.
_OF_PROXIES = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@dataclass(frozen=True)
class PromptText:
    """What a prompt's tokens were made of: the text, and where it comes from; None where that is not known."""

    text: str
    spans: Sequence[Span] | None = None


def asker_of(call: Call[Any], contents: str) -> Asker:
    """Whose prompts share pages with those of a call, whose `contents` are as `rope_choice.contents_key` says."""
    return Asker(call.record.caller, call.cache_salt, contents)


async def compare_prompts(
    call: Call[Any], contents: str, prompts: Sequence[list[int]], texts: Sequence[PromptText | None]
) -> None:
    """Note in the record of a call how its first prompt, of these `contents`, compares with recent ones, if the caller
    asks for that.

    It is done in threads, before the prompt itself is among the recent ones.

    Raises:
        ClientGoneError: the caller went away.
    """
    if not call.body.return_cache_usage:
        return
    service, caller, prompt = call.service, call.record.caller, prompts[0]
    recent = service.recent_prompts.of(asker_of(call, contents))
    found = await call.attend(service.reading.call(nearest, recent, prompt, caller=caller))
    parted = None
    if found is not None and found.common < len(prompt):
        text = texts[0] if texts else None
        work = _parted(call.tokenizer, prompt, text, found, is_own=_is_known(call))
        parted = await call.attend(service.writing.run(work, caller=caller))
    call.record.compare(ComparedPrompt(0 if found is None else found.common, parted))


def _is_known(call: Call[Any]) -> bool:
    """Whether earlier prompts of a call's caller are surely one person's: by a key, a salt, or on the server's own
    machine."""
    if call.record.key is not None or call.cache_salt:
        return True
    client = call.request.client
    return client is not None and is_loopback(client.host) and not any(h in call.request.headers for h in _OF_PROXIES)


def _parted(
    tokenizer: Tokenizer, prompt: list[int], text: PromptText | None, found: Nearest, *, is_own: bool
) -> Generator[None, None, PartedPrompt]:
    """Work that returns where a prompt parts from the nearest one, which it does. What that one says is told if it
    surely `is_own` of the caller."""
    spans = None if text is None else text.spans
    if text is None:
        text = PromptText((yield from tokenizer.decoding(prompt)))
        spans = [Span(0, len(text.text), Place("prompt"))]
    places = TokenPlaces(text.text, tokenizer)
    for start in range(0, found.common, _TOKENS_A_STEP):
        for token in prompt[start : min(start + _TOKENS_A_STEP, found.common)]:
            places.next(token)
        yield
    mine = _behind(tokenizer, prompt, found.common)
    other = _behind(tokenizer, found.tokens.tolist(), found.common)
    # The tokens part where the texts still may not: "Monday" and "Mon" begin alike.
    pairs = enumerate(zip(mine, other, strict=False))
    alike = next((number for number, (one, another) in pairs if one != another), 0)
    at = places.offset + alike
    both = text.text[max(0, at - _CHARACTERS_BEFORE - 1) : at]
    place = Place("template") if spans is None else place_at(spans, at)
    return PartedPrompt(
        token=found.common,
        character=at,
        message=place.message,
        role=place.role,
        field=None if spans is None else place.field,
        now=_excerpt(both, text.text[at : at + _CHARACTERS_BEHIND + 1]),
        before=_excerpt(both, other[alike:]) if is_own else None,
    )


def _behind(tokenizer: Tokenizer, tokens: list[int], at: int) -> str:
    """The text of a few tokens from the place `at` on; a character that has tokens on both sides is behind it."""
    detokenizer = tokenizer.detokenizer(special=True)
    for token in tokens[max(0, at - _TOKENS_BEFORE) : at]:
        detokenizer.push(token)
    return "".join(map(detokenizer.push, tokens[at : at + _TOKENS_BEHIND])) + detokenizer.flush()


def _excerpt(before: str, behind: str) -> str:
    """A few characters around a place, with dots where there are more."""
    left = "…" if len(before) > _CHARACTERS_BEFORE else ""
    right = "…" if len(behind) > _CHARACTERS_BEHIND else ""
    return f"{left}{before[-_CHARACTERS_BEFORE:]}{behind[:_CHARACTERS_BEHIND]}{right}"
