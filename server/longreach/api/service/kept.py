"""A kept response, in the two parts that its rows are made of: what a later prompt says again, and all the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Item = dict[str, Any]

_SCORES = "logprobs"


@dataclass(frozen=True)
class Kept:
    """A kept response.

    Attributes:
        body: its JSON object, with the log-probabilities of the output's parts in place of `output`; those of a row are
            JSON still, since nobody reads them here.
        output: the items of its output, without log-probabilities.
    """

    body: dict[str, Any]
    output: list[Item]

    @classmethod
    def of(cls, body: dict[str, Any], output: Sequence[Item]) -> Kept:
        """Split a response: log-probabilities may be a hundred times as long as the words that are read again."""
        scores = [[part.get(_SCORES) for part in _parts(item)] for item in output]
        bare = [
            {**item, "content": [{**part, _SCORES: []} if part.get(_SCORES) else part for part in _parts(item)]}
            if any(of_item)
            else item
            for item, of_item in zip(output, scores, strict=True)
        ]
        return cls({**body, "output": scores if any(map(any, scores)) else []}, bare)

    @property
    def whole(self) -> dict[str, Any]:
        """The response's JSON object."""
        output = self.output
        scores = self.body.get("output")
        if isinstance(scores, msgspec.Raw):
            scores = msgspec.json.decode(scores, type=list[list[msgspec.Raw]])
        if scores:
            output = [_scored(item, own) for item, own in zip(output, scores, strict=True)]
        return {name: output if name == "output" else value for name, value in self.body.items()}


def _parts(item: Item) -> list[dict[str, Any]]:
    """The parts of an item that may have log-probabilities."""
    content = item.get("content")
    return content if isinstance(content, list) else []


def _scored(item: Item, scores: Sequence[Any]) -> Item:
    if not any(map(_has_scores, scores)):
        return item
    parts = zip(_parts(item), scores, strict=True)
    return {**item, "content": [{**part, _SCORES: own} if _has_scores(own) else part for part, own in parts]}


def _has_scores(of_part: Any) -> bool:
    if isinstance(of_part, msgspec.Raw):
        return memoryview(of_part).nbytes > len(b"null")  # else it is that, or an empty list
    return bool(of_part)
