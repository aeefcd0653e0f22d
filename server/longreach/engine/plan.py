"""What one step of the engine does, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .request import Request
from .speculation import standing
from .step_time import Work


@dataclass(frozen=True)
class Chunk:
    """Compute `length` tokens of a request from `start` on, the last of which may be drafts.

    If that reaches the end of its known tokens, the next token is drawn, and one more after each draft.
    """

    request: Request
    start: int
    length: int
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position after the chunk's last token."""
        return self.start + self.length

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute."""
        return [*self.request.tokens[self.start : self.end], *self.drafts]

    @cached_property
    def num_draws(self) -> int:
        """How many tokens are drawn, one from each of the chunk's last rows."""
        completes = self.end - len(self.drafts) == len(self.request.tokens)
        return 1 + len(self.drafts) if completes else 0

    @cached_property
    def scored(self) -> range:
        """The positions in the prompt whose log-probabilities are computed, each from the row before it."""
        if not self.request.wants_scores:
            return range(0)
        return range(max(self.start + 1, self.request.scored), min(self.end + 1, self.request.prompt_tokens))

    @cached_property
    def num_rows(self) -> int:
        """Of how many of its last tokens the logits are needed: those that draw, and those before scored tokens."""
        return self.end - (self.scored.start - 1) if self.scored else self.num_draws

    def standing(self, drawn: list[int]) -> list[int]:
        """The new tokens of the request, of those `drawn`."""
        return standing(self.drafts, drawn)


@dataclass(frozen=True)
class StepPlan:
    """The chunks of one forward pass: first those of a single token, then the longer ones."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Rows in the forward pass."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def work(self) -> Work:
        """What the step costs, as the model of step time counts it."""
        return Work.of_step((chunk.start, chunk.length) for chunk in self.chunks)

    @property
    def num_decodes(self) -> int:
        """Leading chunks of exactly one token."""
        return sum(chunk.length == 1 for chunk in self.chunks)

    @property
    def is_decode_only(self) -> bool:
        """Whether every chunk is one token that draws the next: the shape that CUDA graphs replay."""
        return all(chunk.length == chunk.num_draws == chunk.num_rows == 1 for chunk in self.chunks)
