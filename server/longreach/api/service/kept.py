"""A kept response, in the two parts that its rows are made of: what a later prompt says again, and all the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Item = dict[str, Any]

_SCORES = "logprobs"


@dataclass(frozen=True)
class Kept:
    """A kept response.

    Attributes:
        body: its JSON object, with the log-probabilities of the output's parts in place of `output`.
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
        if self.body.get("output"):
            output = [_scored(item, scores) for item, scores in zip(output, self.body["output"], strict=True)]
        return {name: output if name == "output" else value for name, value in self.body.items()}


def _parts(item: Item) -> list[dict[str, Any]]:
    """The parts of an item that may have log-probabilities."""
    content = item.get("content")
    return content if isinstance(content, list) else []


def _scored(item: Item, scores: Sequence[Any]) -> Item:
    if not any(scores):
        return item
    parts = [{**part, _SCORES: own} if own else part for part, own in zip(_parts(item), scores, strict=True)]
    return {**item, "content": parts}
