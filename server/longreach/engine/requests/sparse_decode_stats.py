"""What the tokens of one answer have read under a decode budget, summed up as its steps end. Plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class TokenRead(NamedTuple):
    """What one token has read in each head of a layer: `keys`, and the bounds of `blocks`; and of what it missed of the
    attention the upper bounds, their mean and greatest over layers and heads; and in how many layers it read all."""

    keys: int
    blocks: int
    missed_mean: float
    missed_max: float
    whole: int = 0


@dataclass
class AnswerReads:
    """Sums over an answer's tokens that had more keys than `budget`, each counted once although a preemption has it
    computed again.

    Attributes:
        budget: keys that a token reads at most in each head of a layer.
        end: tokens before this position have been counted.
        queries: how many.
        keys, read, blocks: keys that they might have read, keys that they did read, and blocks whose bounds they read.
        whole, whole_keys: layers in which a token read all keys, and keys that were read there besides, summed.
        missed_sum, missed_max: of what they missed, the sum of the means and the greatest.
        sampled, kept_sum, kept_least: tokens whose kept mass was measured, the sum of their means, and the least.
    """

    budget: int
    end: int = 0
    queries: int = 0
    keys: int = 0
    read: int = 0
    blocks: int = 0
    whole: int = 0
    whole_keys: int = 0
    missed_sum: float = 0.0
    missed_max: float = 0.0
    sampled: int = 0
    kept_sum: float = 0.0
    kept_least: float = 1.0

    def add(self, start: int, tokens: Iterable[TokenRead]) -> None:
        """Count the tokens from position `start` on."""
        for position, token in enumerate(tokens, start):
            if position < self.end:
                continue
            self.end = position + 1
            self.queries += 1
            self.keys += position + 1
            self.read += token.keys
            self.blocks += token.blocks
            self.whole += token.whole
            self.whole_keys += token.whole * (position + 1 - token.keys)
            self.missed_sum += token.missed_mean
            self.missed_max = max(self.missed_max, token.missed_max)

    def add_kept(self, mean: float, least: float) -> None:
        """Count what one token kept of the dense softmax's mass."""
        self.sampled += 1
        self.kept_sum += mean
        self.kept_least = min(self.kept_least, least)
