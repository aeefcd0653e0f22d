"""What of the prompt the sentences of an answer attended to: from blocks of tokens to characters of the caller's texts.

The engine tells of each token the blocks of the prompt that its query attended to most. The scores of a sentence's
tokens are added up. Attention is no proof: it says where the model looked, and not what the answer follows from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from longreach.api.generation.compare_prompts import PromptText
from longreach.api.schema.answers.usage import AnswerPlace, SentencePlaces
from longreach.api.service.call import Call
from longreach.documents.wrapping import opening
from longreach.engine.messages import Started
from longreach.engine.updates import AttendedBlocks
from longreach.errors import InvalidRequestError
from longreach.policies.values import AttentionPolicy
from longreach.sizes import KEY_BLOCK
from longreach.text.prompt_places import Place, Span
from longreach.text.sentences import Stretch, excerpt, sentences
from longreach.text.token_places import TokenPlaces
from longreach.text.tokenizer import Tokenizer

_PLACES = 3
_MOST_SENTENCES = 256
_MOST_CHARACTERS = 200
_LEAST_WEIGHT = 0.05
# Blocks of a sentence that may become places: neighbours are often in one.
_CANDIDATES = 12
_TOKENS_A_STEP = 4096


@dataclass(frozen=True)
class AttendedAnswer:
    """One answer and what its tokens attended to.

    Attributes:
        choice: its number among the answers of the request.
        prompt: token ids of its prompt.
        source: what the prompt was made of; None where that is not known.
        text: the answer as it was told.
        tokens: of each token where it begins in the text, and what it attended to.
    """

    choice: int
    prompt: Sequence[int]
    source: PromptText | None
    text: str
    tokens: Sequence[tuple[int, AttendedBlocks]]


class _Kept(NamedTuple):
    """Where a kept document stands in a prompt, and its id."""

    start: int
    end: int
    id: str


def check_places(info: Started, attention: AttentionPolicy, *, several_gpus: bool) -> None:
    """Raise an InvalidRequestError if it cannot be seen what an answer under this policy attends to."""
    if not attention.answer_sees_all:
        why = f"an answer under the policy {attention.name} does not see all keys. Ask with dense attention, or with "
        why += "`dynamic` without a `decode_budget`"
    elif info.attended_layers:
        return
    elif several_gpus:
        why = "this server computes on several GPUs, of which none has the attention of all heads"
    else:
        why = "no layer of this model sees the whole prompt"
    raise InvalidRequestError(f"`return_places`: {why}.", param="return_places", code="unsupported_value")


async def places_of(call: Call[Any], answer: AttendedAnswer) -> list[SentencePlaces]:
    """The places of each sentence of an answer, the first 256 at most. The work is done in threads.

    Raises:
        ClientGoneError: the caller went away.
    """
    document = call.document
    kept = None if document is None or not document.text else (document.text, document.document)
    work = _places(call.tokenizer, answer, kept)
    return await call.attend(call.service.writing.run(work, caller=call.record.caller))


def _places(
    tokenizer: Tokenizer, answer: AttendedAnswer, document: tuple[str, Any] | None
) -> Generator[None, None, list[SentencePlaces]]:
    source = answer.source
    if source is None:
        text = yield from tokenizer.decoding(answer.prompt)
        source = PromptText(text, [Span(0, len(text), Place("prompt"))])
    of_sentences = list(_scored(answer))
    wanted = {block for _, scores in of_sentences for block, _ in scores.most_common(_CANDIDATES)}
    borders = yield from _borders(tokenizer, answer.prompt, source.text, wanted)
    kept = None if document is None else _kept(source.text, *document)
    found = []
    for sentence, scores in of_sentences:
        places = _best(source, scores, borders, kept)
        found.append(
            SentencePlaces(choice=answer.choice, sentence=answer.text[sentence.start : sentence.end], places=places)
        )
        yield
    return found


def _scored(answer: AttendedAnswer) -> Iterable[tuple[Stretch, Counter[int]]]:
    """The sentences of an answer, and the sums of their tokens' scores by block. What is between two sentences, such as
    the blank before a word, belongs to the one that follows."""
    tokens = iter(answer.tokens)
    at, attended = next(tokens, (len(answer.text), None))
    for sentence in sentences(answer.text)[:_MOST_SENTENCES]:
        scores: Counter[int] = Counter()
        while attended is not None and at < sentence.end:
            for block, score in zip(attended.blocks, attended.scores, strict=True):
                scores[block] += score  # pyright: ignore[reportArgumentType]
            at, attended = next(tokens, (len(answer.text), None))
        yield sentence, scores


def _borders(
    tokenizer: Tokenizer, prompt: Sequence[int], text: str, blocks: set[int]
) -> Generator[None, None, dict[int, int]]:
    """Where in the prompt's text these blocks, and the ones behind them, begin."""
    found: dict[int, int] = {}
    if not blocks:
        return found
    wanted = blocks | {block + 1 for block in blocks}
    places = TokenPlaces(text, tokenizer)
    last = (max(blocks) + 1) * KEY_BLOCK
    for start in range(0, last, _TOKENS_A_STEP):
        for number in range(start, min(start + _TOKENS_A_STEP, last, len(prompt))):
            if number % KEY_BLOCK == 0 and number // KEY_BLOCK in wanted:
                found[number // KEY_BLOCK] = places.offset
            places.next(prompt[number])
        yield
    found[max(blocks) + 1] = places.offset
    return found


def _kept(prompt: str, text: str, document: Any) -> _Kept | None:
    """Where the text of a document stands in a prompt that begins with it."""
    if prompt.startswith(text):
        return _Kept(0, len(text), document.id)
    head = opening(document.name)
    start = prompt.find(head) + len(head)
    return _Kept(start, start + len(text), document.id) if prompt.startswith(text, start) else None


def _best(source: PromptText, scores: Counter[int], borders: dict[int, int], kept: _Kept | None) -> list[AnswerPlace]:
    """The best places: excerpts around the best blocks, and the share of the sentence's scores that each has."""
    total = sum(scores.values())
    found: list[tuple[Stretch, Span, float]] = []
    for block, score in scores.most_common(_CANDIDATES):
        start, end = borders[block], borders[block + 1]
        span = _span(source, start, end)
        if span is None:
            continue
        start, end = max(start, span.start), min(end, span.end)
        middle = (start + end) // 2
        for number, (stretch, own, share) in enumerate(found):
            if stretch.start <= middle < stretch.end:
                found[number] = stretch, own, share + score
                break
        else:
            if len(found) < _PLACES:
                inside = excerpt(
                    source.text[span.start : span.end], start - span.start, end - span.start, _MOST_CHARACTERS
                )
                if inside.end > inside.start:
                    found.append((Stretch(span.start + inside.start, span.start + inside.end), span, score))
    ranked = sorted((one for one in found if one[2] >= _LEAST_WEIGHT * total), key=lambda one: -one[2])
    return [_told(source, stretch, span, share / total, kept) for stretch, span, share in ranked]


def _span(source: PromptText, start: int, end: int) -> Span | None:
    """Where most of these characters come from; None where the template has written them."""
    if source.spans is None:
        return Span(0, len(source.text), Place("template"))
    overlaps = [(min(end, span.end) - max(start, span.start), span) for span in source.spans]
    width, span = max(overlaps, key=lambda one: one[0], default=(0, None))
    return span if width > 0 else None


def _told(source: PromptText, stretch: Stretch, span: Span, weight: float, kept: _Kept | None) -> AnswerPlace:
    place = span.place
    offset = stretch.start - span.start + span.blanks
    in_document = kept is not None and kept.start <= stretch.start and stretch.end <= kept.end
    return AnswerPlace(
        start=stretch.start,
        end=stretch.end,
        message=place.message,
        role=place.role,
        field=None if source.spans is None else "document" if in_document else place.field,
        document=kept.id if kept is not None and in_document else None,
        offset=None if source.spans is None else stretch.start - kept.start if kept and in_document else offset,
        text=source.text[stretch.start : stretch.end],
        weight=round(weight, 4),
    )
