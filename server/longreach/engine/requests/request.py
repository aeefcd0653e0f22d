"""One request inside the engine: its tokens, how many of them are computed, and the pages that hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longreach.engine.messages import Generate
from longreach.engine.requests.awaited import Awaited
from longreach.engine.requests.measurements import Measurements
from longreach.engine.requests.page_hold import PageHold
from longreach.engine.requests.prompt_lookup import PromptLookup
from longreach.engine.requests.sparse_decode_stats import AnswerReads
from longreach.engine.requests.state_hold import StateHold
from longreach.engine.requests.token_counts import TokenCounts
from longreach.engine.updates import AttendedBlocks, FinishReason, Logprob
from longreach.policies.values import SparseDecode, StepPolicy
from longreach.policies.visible import Visible

# Stands in `Request.tokens` for a token that a step in flight draws.
PENDING = -1


class Constraint(Protocol):
    """The state of one answer within its grammar, as plain data; `sampling.grammar` has the real one."""

    def mask(self) -> npt.NDArray[np.uint8] | None:
        """Which tokens may come next, (ceil(V / 8),), the lowest bit first; None after an error."""
        ...

    def accept(self, token: int) -> bool:
        """The token was drawn; whether the answer is complete, so that nothing may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further."""
        ...


@dataclass(eq=False)
class Request:
    """A sequence that grows: the prompt, then what was generated.

    There are no phases. `computed` tokens have their keys and values in pages, or will have when the steps in flight
    have ended; the rest are wanted. When all are computed the model's last row gives the next token, which is then
    wanted in turn, even before it is known.

    Attributes:
        pending: how many tokens at the end are still being drawn.
        arrived: when it came, in seconds on the engine's clock.
        visible: how many keys its attention policy lets a query see, for predictions; None for all.
        visible_to_answer: the same of the tokens of its answer that may not read all keys.
        hold: what it holds of the KV cache; the allocator alone writes to it.
        states: what it holds of the slots for recurrent states; their allocator alone writes to it.
        redo: how many tokens of its answer are computed a second time, since its state went back before drafts.
        seq_slot: its place among the running requests, in the table of page ids and for the token that it drew last; -1
            while it waits.
        preempted: it had to give its pages back once, or lost them with an engine that died.
        waited: seconds from its arrival to its first step, once that has begun.
        awaited: since when it waits for what comes back from host memory or disk, if it does.
        compiling: whether it computes nothing until kernels that it needs are compiled.
        scored: of how many of its prompt's first tokens the log-probabilities are, or are being, computed.
        logprobs: log-probabilities by position, from when they are computed to when they are told.
        attended: what tokens of its answer attended to, by position, from when it is computed to when it is told.
        measured: what its attention policy has left out, so far as that is measured.
        constraint: what says which tokens may come next, if the answer has to follow a grammar.
    """

    spec: Generate
    seed: int
    tokens: list[int]
    arrived: float = 0.0
    pending: int = 0
    computed: int = 0
    hold: PageHold = field(default_factory=PageHold)
    states: StateHold = field(default_factory=StateHold)
    redo: int = 0
    visible: Visible | None = None
    visible_to_answer: Visible | None = None
    seq_slot: int = -1
    preempted: bool = False
    waited: float | None = None
    awaited: Awaited | None = None
    compiling: bool = False
    finish_reason: FinishReason | None = None
    scored: int = 1
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    attended: dict[int, AttendedBlocks] = field(default_factory=dict)
    constraint: Constraint | None = None
    measured: Measurements = field(default_factory=Measurements)
    _lookup: PromptLookup | None = None
    _counts: TokenCounts | None = None

    @classmethod
    def of(cls, spec: Generate, seed: int, arrived: float = 0.0) -> Request:
        """A request of which nothing is computed yet; `seed` is used for sampling if the caller gave none."""
        own = spec.sampling.seed
        budget = spec.attention.answer_budget
        measured = Measurements(reads=None if budget is None else AnswerReads(budget))
        tokens = [*spec.prompt, *spec.drawn]
        again = bool(spec.drawn)
        return cls(spec, seed if own is None else own, tokens, arrived, preempted=again, measured=measured)

    @property
    def id(self) -> str:
        """The caller's id."""
        return self.spec.request_id

    def foresee(self, dense_share: float) -> None:
        """Note how many keys its queries see, where `dense_share` of the full layers see all whatever its policy is."""
        self.visible = self.spec.attention.visible().beside_dense(dense_share)
        if self.reads is not None:
            self.visible_to_answer = SparseDecode(self.reads.budget).visible().beside_dense(dense_share)

    def policy_at(self, position: int) -> StepPolicy:
        """What the query at `position` is computed under."""
        return self.spec.attention.at(position, self.prompt_tokens)

    def policy_ends(self, start: int) -> float:
        """The first position behind `start` that is computed under another policy than `start` itself.

        A chunk ends there at the latest; infinite where there is none.
        """
        borders = self.spec.attention.borders(self.prompt_tokens)
        return next((border for border in borders if start < border), math.inf)

    @property
    def needs_whole_tiles(self) -> bool:
        """Whether its next token belongs to a prompt of which each tile of queries has its keys chosen."""
        return self.spec.attention.query_tile > 1 and self.computed < self.prompt_tokens

    @property
    def reads(self) -> AnswerReads | None:
        """What the tokens of its answer have read, if a budget says how many keys that may be."""
        return self.measured.reads

    @property
    def pages(self) -> list[int]:
        """Ids of its pages, in the order of its tokens."""
        return self.hold.pages

    @property
    def cached(self) -> int:
        """How many of its prompt's tokens were in the prefix cache."""
        return self.hold.cached_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return len(self.spec.prompt)

    @property
    def generated(self) -> int:
        """Tokens drawn so far, pending ones included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def known(self) -> int:
        """Tokens of prompt and answer that are known."""
        return len(self.tokens) - self.pending

    @property
    def wanted(self) -> int:
        """Tokens that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def is_answering(self) -> bool:
        """Whether its next step computes the token that was drawn last, and what has to be computed again before it."""
        return len(self.tokens) - self.computed == 1 + self.redo

    @property
    def is_complete(self) -> bool:
        """Whether its last token is drawn already, or being drawn."""
        return self.generated >= self.spec.max_tokens

    @property
    def needs_its_tokens(self) -> bool:
        """Whether its next step can be planned, or its next token drawn, only when all tokens before are known."""
        return self.spec.speculate > 0 or self.constraint is not None or self.spec.sampling.looks_back

    @property
    def max_length(self) -> int:
        """Tokens that may ever need a place in the pages: the last one drawn is never computed."""
        return self.prompt_tokens + self.spec.max_tokens - 1

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.spec.prompt_logprobs is not None and self.scored < self.prompt_tokens

    @property
    def skippable(self) -> int:
        """How many of the first tokens need not be computed where their keys and values are cached.

        The last token's logits are wanted, and those before each token of the prompt that is to be scored.
        """
        return min(len(self.tokens), self.scored) - 1 if self.wants_scores else len(self.tokens) - 1

    def counts(self) -> TokenCounts:
        """How often which token occurs, for penalties."""
        assert not self.pending, self.id
        if self._counts is None:
            self._counts = TokenCounts(self.spec.prompt if self.spec.sampling.repetition_penalty != 1 else [])
        self._counts.extend(self.tokens[self.prompt_tokens + self._counts.generated :])
        return self._counts

    def may_stop(self, after: int = 0) -> bool:
        """Whether the token drawn `after` tokens from now may be one that ends the request."""
        return self.generated + after >= self.spec.min_tokens

    def draft(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may come next, if the request wants speculation."""
        if not self.spec.speculate:
            return ()
        count = min(limit, self.spec.speculate, self.spec.max_tokens - self.generated - 1)
        count = int(min(count, self.policy_ends(len(self.tokens) - 1) - len(self.tokens)))
        count = int(min(count, self.states.before_border(len(self.tokens))))
        if count < 1 or self.constraint is not None:  # a draft would need the grammar's word on each token before it
            return ()
        if self._lookup is None:
            self._lookup = PromptLookup(self.max_length + 1)
        return self._lookup.draft(self.tokens, count)

    def expect(self) -> None:
        """Make a place for a token that is being drawn."""
        assert self.finish_reason is None, self.id
        self.tokens.append(PENDING)
        self.pending += 1

    def receive(self, token: int) -> None:
        """Put a drawn token into its place, and finish if it is the last one; what was drawn after it is dropped."""
        assert self.finish_reason is None, self.id
        if not self.pending:
            self.expect()
        self.tokens[self.known] = token
        self.pending -= 1
        drawn = self.known - self.prompt_tokens
        complete = self.constraint is not None and self.constraint.accept(token)
        if complete or (drawn > self.spec.min_tokens and token in self.spec.stop_token_ids):
            self.finish_reason = "stop"
        elif drawn >= self.spec.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            del self.tokens[self.known :]
            self.pending = 0
