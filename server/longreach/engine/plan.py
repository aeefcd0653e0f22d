"""What one step of the engine does, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from .request import Request


@dataclass(frozen=True)
class Chunk:
    """Compute tokens `start` to `start + length` of a request; draw the next token if that completes it."""

    request: Request
    start: int
    length: int

    @property
    def end(self) -> int:
        """The number of the request's tokens that are computed after this step."""
        return self.start + self.length

    @property
    def draws(self) -> bool:
        """Whether the next token is drawn from this chunk's last row."""
        return self.end == len(self.request.tokens)


@dataclass(frozen=True)
class StepPlan:
    """The chunks of one forward pass: first those of a single token, then the longer ones."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Rows in the forward pass."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_decodes(self) -> int:
        """Leading chunks of exactly one token."""
        return sum(chunk.length == 1 for chunk in self.chunks)

    @property
    def is_decode_only(self) -> bool:
        """Whether every chunk is one token that draws the next: the shape that CUDA graphs replay."""
        return all(chunk.length == 1 and chunk.draws for chunk in self.chunks)
