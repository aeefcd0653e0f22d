"""What is done to logits before a token is drawn: bias, penalties, and tokens that may not come now.

Everything is a list of places (row, token) with a number for each, so that a step costs what its requests ask for and a
row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from longreach.engine.requests.request import Request


class Draw(NamedTuple):
    """The token that a request draws behind its known ones and `drafts`."""

    request: Request
    drafts: tuple[int, ...] = ()

    @property
    def after(self) -> int:
        """How many tokens are not known yet."""
        return len(self.drafts)

    def completable(self) -> Iterator[list[int]]:
        """The bad words of which all but the last token are the end of the answer so far."""
        words = self.request.spec.sampling.bad_words
        if not words:
            return
        longest = max(map(len, words)) - 1
        request = self.request
        start = max(request.prompt_tokens, len(request.tokens) + len(self.drafts) - longest)
        before = [*request.tokens[start:], *self.drafts][-longest:] if longest else []
        for word in words:
            if len(word) <= len(before) + 1 and word[:-1] == before[len(before) - len(word) + 1 :]:
                yield word


@dataclass(frozen=True)
class Places:
    """P places in the logits with K numbers for each: rows and tokens (P,) int64, values (K, P) float32.

    They are made on the host, and moved to the logits' device as a whole.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, parts: list[tuple[int, np.ndarray, np.ndarray]]) -> Places | None:
        """Join parts of one row each: (row, tokens (P,), values (K, P)). None where there is no part."""
        if not parts:
            return None
        rows = np.concatenate([np.full(len(tokens), row, np.int64) for row, tokens, _ in parts])
        tokens = np.concatenate([tokens for _, tokens, _ in parts])
        values = np.concatenate([values for _, _, values in parts], axis=1)
        return cls(torch.from_numpy(rows), torch.from_numpy(tokens), torch.from_numpy(values))

    def update(self, logits: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the logits here, in place; no place is listed twice.

        What may not be drawn stays so, and what would overflow is the largest number: no change alone forbids a token.
        """
        old = logits[self.rows, self.tokens]
        most = torch.finfo(logits.dtype).max
        logits[self.rows, self.tokens] = torch.where(old == float("-inf"), old, change(old).clamp(-most, most))


@dataclass(frozen=True)
class Adjustments:
    """The changes of one step's logits (R, V).

    Attributes:
        penalties: repetition penalty, frequency penalty times the count, and presence penalty at each place.
        bias: what is added.
        forbidden: pairs (row, token), (F, 2) int64, that may not be drawn.
        allowed_rows: (A,) rows of which few tokens may be drawn, and `allowed`, (P, 2) int64, those tokens: pairs of a
            place in `allowed_rows` and a token.
        grammar_rows: (G,) rows that follow a grammar, and `grammar_masks` (G, ceil(V / 8)) uint8 what it lets them be.
    """

    penalties: Places | None = None
    bias: Places | None = None
    forbidden: torch.Tensor | None = None
    allowed_rows: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    grammar_rows: torch.Tensor | None = None
    grammar_masks: torch.Tensor | None = None

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> Adjustments:
        """Collect what the requests ask for, in the order of their rows."""
        forbidden = [
            (row, token)
            for row, draw in enumerate(draws)
            if not draw.request.may_stop(draw.after)
            for token in draw.request.spec.stop_token_ids
        ]
        forbidden += [(row, word[-1]) for row, draw in enumerate(draws) for word in draw.completable()]
        few = [(row, ids) for row, draw in enumerate(draws) if (ids := draw.request.spec.sampling.allowed_token_ids)]
        allowed = [(place, token) for place, (_, ids) in enumerate(few) for token in ids]
        masks = [
            (row, mask)
            for row, draw in enumerate(draws)
            if draw.request.constraint is not None and (mask := draw.request.constraint.mask()) is not None
        ]
        return cls(
            penalties=Places.of(list(_penalties(draws))),
            bias=Places.of(list(_biases(draws))),
            forbidden=torch.tensor(forbidden) if forbidden else None,
            allowed_rows=torch.tensor([row for row, _ in few]) if few else None,
            allowed=torch.tensor(allowed) if few else None,
            grammar_rows=torch.tensor([row for row, _ in masks]) if masks else None,
            grammar_masks=torch.from_numpy(np.stack([mask for _, mask in masks])) if masks else None,
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The adjusted logits (R, V) float32; those given are not changed.

        A repetition penalty r divides a positive logit by r and multiplies a negative one (Keskar et al. 2019); then
        frequency and presence penalties are subtracted, as in OpenAI's API, and the bias is added.
        """
        changes = (self.penalties, self.bias, self.forbidden, self.allowed_rows, self.grammar_rows)
        if all(change is None for change in changes):
            return logits
        logits = logits.clone()
        if self.penalties is not None:
            repetition, frequency, presence = self.penalties.values
            self.penalties.update(
                logits, lambda old: torch.where(old > 0, old / repetition, old * repetition) - frequency - presence
            )
        if self.bias is not None:
            bias = self.bias.values[0]
            self.bias.update(logits, lambda old: old + bias)
        if self.forbidden is not None:
            logits[self.forbidden[:, 0], self.forbidden[:, 1]] = float("-inf")
        if self.allowed_rows is not None and self.allowed is not None:
            other = torch.ones(len(self.allowed_rows), logits.shape[1], dtype=torch.bool, device=logits.device)
            other[self.allowed[:, 0], self.allowed[:, 1]] = False
            logits[self.allowed_rows] = logits[self.allowed_rows].masked_fill(other, float("-inf"))
        if self.grammar_rows is not None and self.grammar_masks is not None:
            allowed = _unpack(self.grammar_masks, logits.shape[1])
            logits[self.grammar_rows] = logits[self.grammar_rows].masked_fill(~allowed, float("-inf"))
        return logits


def _penalties(draws: Sequence[Draw]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    for row, (request, drafts) in enumerate(draws):
        how = request.spec.sampling
        if not how.penalizes:
            continue
        ids, counts = request.counts().with_drafts(drafts)
        values = np.empty((3, len(ids)), np.float32)
        values[0] = how.repetition_penalty
        values[1] = how.frequency_penalty * counts
        values[2] = how.presence_penalty * (counts > 0)
        yield row, ids.copy(), values


def _biases(draws: Sequence[Draw]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    for row, draw in enumerate(draws):
        if bias := draw.request.spec.sampling.logit_bias:
            yield row, np.fromiter(bias, np.int64, len(bias)), np.array([[*bias.values()]], np.float32)


def _unpack(masks: torch.Tensor, width: int) -> torch.Tensor:
    """(G, bytes) uint8, lowest bit first -> (G, width) bool; what is beyond the mask is not allowed."""
    shifts = torch.arange(8, device=masks.device, dtype=torch.uint8)
    bits = (masks[:, :, None] >> shifts & 1).bool().reshape(len(masks), -1)[:, :width]
    return torch.nn.functional.pad(bits, (0, width - bits.shape[1]))
