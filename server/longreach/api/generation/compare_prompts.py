"""Why a prompt was not cached: where it parts from the caller's recent ones, in tokens, characters and messages."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.api.http.request_log import ComparedPrompt
from longreach.api.schema.answers.usage import PartedPrompt
from longreach.api.service.call import Call
from longreach.api.service.recent_prompts import Asker, Nearest, nearest
from longreach.policies.values import AttentionPolicy
from longreach.text.prompt_places import Place, Span, place_at
from longreach.text.token_places import TokenPlaces
from longreach.text.tokenizer import Tokenizer

# Tokens before and behind the place whose texts are looked at, and characters of those that are told.
_TOKENS_BEFORE, _TOKENS_BEHIND = 64, 64
_CHARACTERS_BEFORE, _CHARACTERS_BEHIND = 16, 24
_TOKENS_A_STEP = 4096


@dataclass(frozen=True)
class PromptText:
    """What a prompt's tokens were made of: the text, and where it comes from; None where that is not known."""

    text: str
    spans: Sequence[Span] | None = None


def asker_of(call: Call[Any], attention: AttentionPolicy) -> Asker:
    """Whose prompts share pages with those of a call."""
    record = call.record
    return Asker(record.caller, record.cache_salt(call.body.cache_salt), attention.key)


async def compare_prompts(
    call: Call[Any], attention: AttentionPolicy, prompts: Sequence[list[int]], texts: Sequence[PromptText | None]
) -> None:
    """Note in the record of a call how its first prompt compares with recent ones, if the caller asks for that.

    It is done in threads, before the prompt itself is among the recent ones.

    Raises:
        ClientGoneError: the caller went away.
    """
    if not call.body.return_cache_usage:
        return
    service, caller, prompt = call.service, call.record.caller, prompts[0]
    recent = service.recent_prompts.of(asker_of(call, attention))
    found = await call.attend(service.reading.call(nearest, recent, prompt, caller=caller))
    parted = None
    if found is not None and found.common < len(prompt):
        text = texts[0] if texts else None
        parted = await call.attend(service.writing.run(_parted(call.tokenizer, prompt, text, found), caller=caller))
    call.record.compare(ComparedPrompt(0 if found is None else found.common, parted))


def _parted(
    tokenizer: Tokenizer, prompt: list[int], text: PromptText | None, found: Nearest
) -> Generator[None, None, PartedPrompt]:
    """Work that returns where a prompt parts from the nearest one, which it does."""
    spans = None if text is None else text.spans
    if text is None:
        text = PromptText((yield from tokenizer.decoding(prompt)))
        spans = [Span(0, len(text.text), Place("prompt"))]
    places = TokenPlaces(text.text, tokenizer)
    for start in range(0, found.common, _TOKENS_A_STEP):
        for token in prompt[start : min(start + _TOKENS_A_STEP, found.common)]:
            places.next(token)
        yield
    start = max(0, found.common - _TOKENS_BEFORE)
    before, mine = _around(tokenizer, prompt, start, found.common)
    _, other = _around(tokenizer, found.tokens.tolist(), start, found.common)
    # The tokens part where the texts still may not: "Monday" and "Mon" begin alike.
    pairs = enumerate(zip(mine, other, strict=False))
    alike = next((number for number, (one, another) in pairs if one != another), 0)
    place = Place("template") if spans is None else place_at(spans, places.offset + alike)
    return PartedPrompt(
        token=found.common,
        character=places.offset + alike,
        message=place.message,
        role=place.role,
        field=None if spans is None else place.field,
        now=_excerpt(before + mine[:alike], mine[alike:], begins=not start),
        before=_excerpt(before + other[:alike], other[alike:], begins=not start),
    )


def _around(tokenizer: Tokenizer, tokens: list[int], start: int, at: int) -> tuple[str, str]:
    """The text of tokens from `start` on, before and behind the place `at`; a character that has tokens on both sides
    is behind it."""
    detokenizer = tokenizer.detokenizer(special=True)
    before = "".join(map(detokenizer.push, tokens[start:at]))
    behind = "".join(map(detokenizer.push, tokens[at : at + _TOKENS_BEHIND])) + detokenizer.flush()
    return before, behind


def _excerpt(before: str, behind: str, *, begins: bool) -> str:
    """A few characters around a place, with dots where there are more."""
    left = "" if begins and len(before) <= _CHARACTERS_BEFORE else "…"
    right = "…" if len(behind) > _CHARACTERS_BEHIND else ""
    return f"{left}{before[-_CHARACTERS_BEFORE:]}{behind[:_CHARACTERS_BEHIND]}{right}"
