"""What one step of the engine does, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from longreach.engine.cost_model import Work
from longreach.engine.requests.prompt_lookup import standing
from longreach.engine.requests.request import Request
from longreach.engine.requests.state_hold import StateSlots
from longreach.policies.values import SparseDecode, StepPolicy
from longreach.policies.visible import Visible


@dataclass(frozen=True)
class Chunk:
    """Compute `length` tokens of a request from `start` on, the last of which may be drafts.

    If that reaches the end of its tokens, `num_draws` are drawn, one from each of the chunk's last rows: the next
    token, and one more after each draft. `scored` are the positions in the prompt whose log-probabilities are computed,
    each from the row before it.

    `as_decodes`: whether attention takes each token for a sequence of its own that computes one token, whose kernel
    rounds otherwise than that for several. A lone token is always one of these, but where bits must not depend on how
    tokens came together: there all tokens of answers are, and no token of a prompt is.

    `state` are the slots of its recurrent state, if the model has one.
    """

    request: Request
    start: int
    length: int
    drafts: tuple[int, ...]
    num_draws: int
    scored: range = range(0)
    as_decodes: bool = False
    state: StateSlots | None = None

    @classmethod
    def of(
        cls,
        request: Request,
        length: int,
        drafts: tuple[int, ...] = (),
        *,
        batch_invariant: bool = False,
        state: StateSlots | None = None,
    ) -> Chunk:
        """The next `length` tokens of a request, `drafts` included."""
        completes = request.computed + length - len(drafts) == len(request.tokens)
        start, end = request.computed, request.computed + length
        scored = range(0)
        if request.wants_scores:
            scored = range(max(start + 1, request.scored), min(end + 1, request.prompt_tokens))
        is_answer = start >= request.prompt_tokens
        assert not batch_invariant or is_answer or end <= request.prompt_tokens, request.id
        as_decodes = is_answer if batch_invariant else length == 1
        return cls(request, start, length, drafts, 1 + len(drafts) if completes else 0, scored, as_decodes, state)

    @property
    def num_sequences(self) -> int:
        """As how many sequences attention computes it."""
        return self.length if self.as_decodes else 1

    @property
    def policy(self) -> StepPolicy:
        """The attention policy that it is computed under."""
        return self.request.policy_at(self.start)

    @property
    def visible(self) -> Visible | None:
        """How many keys its policy lets a query see, about; None for all."""
        policy = self.policy
        if policy.is_dense:
            return None
        return self.request.visible_to_answer if isinstance(policy, SparseDecode) else self.request.visible

    @property
    def end(self) -> int:
        """The position after the chunk's last token."""
        return self.start + self.length

    @property
    def num_rows(self) -> int:
        """Of how many of its last tokens the logits are needed: those that draw, and those before scored tokens."""
        return self.end - (self.scored.start - 1) if self.scored else self.num_draws

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute; PENDING for one that the step before this draws."""
        return [*self.request.tokens[self.start : self.end], *self.drafts]

    def standing(self, drawn: list[int]) -> list[int]:
        """The new tokens of the request, of those `drawn`."""
        return standing(self.drafts, drawn)


@dataclass(frozen=True)
class StepPlan:
    """The chunks of one forward pass: policy by policy, the dense ones first, and of each policy first those that are
    computed as decodes (a lone token, most often), then the others."""

    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> StepPlan:
        """A plan of these chunks, put in order; chunks that are alike stay in theirs."""
        return cls(tuple(sorted(chunks, key=_place)))

    @property
    def num_tokens(self) -> int:
        """Rows in the forward pass."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def work(self) -> Work:
        """What the step costs, as the model of step time counts it."""
        return Work.of_step((chunk.start, chunk.length, chunk.visible) for chunk in self.chunks)

    @property
    def num_decodes(self) -> int:
        """Chunks that are computed as decodes."""
        return sum(chunk.as_decodes for chunk in self.chunks)

    @property
    def is_bounded(self) -> bool:
        """Whether prompts were cut to what the bound on inter-token delay leaves beside answers."""
        answers = [chunk for chunk in self.chunks if chunk.as_decodes]
        return len(answers) < len(self.chunks) and not all(chunk.request.spec.flexible for chunk in answers)

    @property
    def is_dense(self) -> bool:
        """Whether no chunk has a policy that is not dense."""
        return all(chunk.policy.is_dense for chunk in self.chunks)

    @property
    def groups(self) -> list[tuple[StepPolicy, tuple[Chunk, ...]]]:
        """The chunks of each policy, in order."""
        by_policy = groupby(self.chunks, key=lambda chunk: chunk.policy)
        return [(policy, tuple(chunks)) for policy, chunks in by_policy]

    @property
    def is_decode_only(self) -> bool:
        """Whether every chunk is one token that draws the next: the shape that CUDA graphs replay."""
        return all(chunk.length == chunk.num_draws == 1 for chunk in self.chunks)  # one row, whatever is scored


def _place(chunk: Chunk) -> tuple[Any, ...]:
    """Where a chunk stands in a step. Of prompts the longest is last: prefill kernels begin with the last sequence, and
    a long one begun late would be computed beside nothing."""
    policy = chunk.policy
    within = 0 if chunk.as_decodes else chunk.end
    return not policy.is_dense, policy.key, not chunk.as_decodes, within
