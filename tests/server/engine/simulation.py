"""A model of the model: pages that remember what was written to them, next tokens that depend on the whole prefix.

It stands in for the runner wherever a test is about scheduling, pages or speculation. A row's output is computed from
what its pages hold and from nothing else, so that a page that was handed to the wrong request, written to while shared,
or taken over with other contents gives another stream than `expected_stream`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from longreach.engine.cost_model import StepCost
from longreach.engine.kv_cache.offload_index import PageMoves
from longreach.engine.messages import Generate, Logprob
from longreach.engine.requests.request import PENDING, Request
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.engine.sampling.sampler import NOT_A_NUMBER

NO_MOVES = PageMoves([], [], [], [])


def _state(previous: bytes, salt: str, token: int, as_decode: bool = False) -> bytes:
    return hashlib.blake2b(previous + f"{salt}/{token}{'+' * as_decode};".encode(), digest_size=8).digest()


def _mixed(page: bytes, state: bytes) -> bytes:
    """What a model of both kinds computes: what each alone would, where they agree, and something else where not."""
    return page if page == state else page + state


def _next_token(state: bytes, seed: int, vocabulary: int) -> int:
    return hashlib.blake2b(state + seed.to_bytes(9, "big", signed=True), digest_size=2).digest()[0] % vocabulary


def expected_stream(spec: Generate, seed: int, vocabulary: int, rounds: bool = False) -> list[int]:
    """The tokens that a request gets: one after the other, without pages; `rounds` as for `SimulatedRunner`."""
    state, tokens = b"", []
    for token in spec.prompt:
        state = _state(state, spec.cache_salt, token)
    while len(tokens) < spec.max_tokens:
        tokens.append(_next_token(state, seed, vocabulary))
        if tokens[-1] in spec.stop_token_ids and len(tokens) > spec.min_tokens:
            break
        state = _state(state, spec.cache_salt, tokens[-1], as_decode=rounds)
    return tokens


class SimulatedRunner:
    """Runs plans over simulated pages; `clock` advances by what a step costs, if a cost is given.

    With `overlaps` it behaves as a GPU does: results are taken later than steps are launched. With `rounds` it does as
    one in another way, too: what is computed of a token as a decode is not what is computed of it otherwise.

    `kinds` are those of the model's layers: of "full" a row is computed from what the pages hold, of "state" from the
    slot alone that the chunk starts from.
    """

    def __init__(
        self,
        page_size: int,
        vocabulary: int = 3,
        cost: StepCost | None = None,
        overlaps: bool = False,
        rounds: bool = False,
        kinds: tuple[str, ...] = ("full",),
    ) -> None:
        self.overlaps = overlaps
        self._kinds = kinds
        self._states: dict[int, bytes] = {}  # by slot
        self._not_numbers: set[int] = set()  # slots
        self._rounds = rounds
        self.now = 0.0
        self.computed_tokens = 0
        self.steps = 0
        self.after_step: Callable[[StepPlan], None] = lambda plan: None
        self.broken: set[str] = set()  # requests whose numbers break the next time that they draw
        self.not_numbers: set[int] = set()  # pages that hold what is no number
        self.before_result: Callable[[], None] = lambda: None
        self._page_size = page_size
        self._vocabulary = vocabulary
        self._cost = cost
        self._seconds: float | None = None
        self._contents: dict[int, dict[int, bytes]] = {}  # by page and place in it
        self._drawn: dict[int, int] = {}  # by sequence slot
        # Before a move takes place; it may raise, and then nothing of it does.
        self.before_move: Callable[[PageMoves], None] = lambda moves: None
        self.moves = self.copied = 0
        self._host: dict[int, tuple[dict[int, bytes], bool]] = {}  # by slot: contents, and whether they are no numbers
        self._late = NO_MOVES
        self._arriving: set[int] = set()
        self._leaving: set[int] = set()

    def clock(self) -> float:
        """Seconds of simulated time."""
        return self.now

    def launch(self, plan: StepPlan) -> Callable[[], dict[str, list[int]]]:
        """As `StepRunner.launch`."""
        self.steps += 1
        self.computed_tokens += plan.num_tokens
        seconds = 0.0 if self._cost is None else self._cost.seconds(plan.work)
        self.now += seconds
        drawn = {}
        scores = [(chunk.request, position) for chunk in plan.chunks for position in chunk.scored]
        for chunk in plan.chunks:
            read = chunk.request.pages[: -(-chunk.end // self._page_size)]
            clean = chunk.request.id in self.broken or not self.not_numbers.intersection(read)
            assert clean, "a step reads a page that was to be cleaned"
            assert self._arriving.isdisjoint(read), "a step reads a page that is on its way from the host"
            written = chunk.request.pages[chunk.start // self._page_size : -(-chunk.end // self._page_size)]
            assert self._leaving.isdisjoint(written), "a step writes to a page that is on its way to the host"
            tokens = [self._drawn[chunk.request.seq_slot] if token == PENDING else token for token in chunk.token_ids]
            as_decode = self._rounds and chunk.as_decodes
            states = [self._write(chunk.request, chunk.start + i, token, as_decode) for i, token in enumerate(tokens)]
            if "state" in self._kinds:
                read = self._read_state(chunk, tokens)
                states = read if "full" not in self._kinds else list(map(_mixed, states, read))
            if chunk.num_draws:
                rows = states[-chunk.num_draws :]
                drawn[chunk.request.id] = [_next_token(row, chunk.request.seed, self._vocabulary) for row in rows]
        if "state" in self._kinds:
            others, written = zip(*(chunk.state for chunk in plan.chunks if chunk.state is not None), strict=True)
            assert len(set(written)) == len(written), "two sequences of a step leave their states in one slot"
            assert not set(written) & set(others), "a step writes to a slot that it reads"
        self.after_step(plan)
        for chunk in plan.chunks:
            if chunk.num_draws:
                self._drawn[chunk.request.seq_slot] = drawn[chunk.request.id][-1]
                if chunk.request.id in self.broken:
                    drawn[chunk.request.id] = [NOT_A_NUMBER] * chunk.num_draws
                    self.not_numbers.update(chunk.request.pages[chunk.start // self._page_size :])
                    if chunk.state is not None:
                        self._not_numbers.add(chunk.state.write)

        def result() -> dict[str, list[int]]:
            self.before_result()
            if self.overlaps:
                self._seconds = (self._seconds or 0.0) + seconds
            for request, position in scores:
                request.logprobs[position] = Logprob(request.tokens[position], 0.0)
            return drawn

        return result

    def take_seconds(self) -> float | None:
        """As `StepRunner.take_seconds`."""
        seconds, self._seconds = self._seconds, None
        return seconds

    def move(self, moves: PageMoves) -> None:
        """As `StepRunner.move`; what is restored or saved is copied as late as it may be, before the move after it."""
        self._copy_late()
        self.before_move(moves)
        self.moves += 1
        self.copied += moves.copies
        self._save(moves.evicted)
        for page in moves.unclean:
            self._contents.pop(page, None)
        self.not_numbers.difference_update(moves.unclean)
        self._late = moves
        for _, page in moves.restored:
            self._arriving.add(page)
        self._leaving.update(page for page, _ in moves.saved)

    def _copy_late(self) -> None:
        for slot, page in self._late.restored:
            self._forget(page)
            states, wrong = self._host[slot]
            self._contents[page] = dict(states)
            self.not_numbers |= {page} if wrong else set()
        self._save(self._late.saved)
        self._late = NO_MOVES
        self._arriving.clear()
        self._leaving.clear()

    def _save(self, copies: list[tuple[int, int]]) -> None:
        for page, slot in copies:
            states = dict(self._contents.get(page, {}))
            assert len(states) == self._page_size, "a page is kept that is not full"
            self._host[slot] = states, page in self.not_numbers

    def _forget(self, page: int) -> None:
        self._contents.pop(page, None)
        self.not_numbers.discard(page)

    def recover(self) -> None:
        """As `StepRunner.recover`: there is no device that could be lost."""

    def _write(self, request: Request, position: int, token: int, as_decode: bool) -> bytes:
        before = b"" if position == 0 else self._page(request, position - 1)[(position - 1) % self._page_size]
        state = _state(before, request.spec.cache_salt, token, as_decode)
        self._page(request, position)[position % self._page_size] = state
        return state

    def _read_state(self, chunk: Chunk, tokens: list[int]) -> list[bytes]:
        """The states behind each token of a chunk, as a recurrent layer has them: from its slot, and from no page."""
        assert chunk.state is not None, "a step of this model says nothing of slots"
        read, write = chunk.state
        assert read not in self._not_numbers or chunk.request.id in self.broken, "a step starts from no numbers"
        self._not_numbers.discard(write)
        state, states = b"" if read < 0 else self._states[read], []
        for token in tokens:
            state = _state(state, chunk.request.spec.cache_salt, token)
            states.append(state)
        self._states[write] = state
        return states

    def _page(self, request: Request, position: int) -> dict[int, bytes]:
        return self._contents.setdefault(request.pages[position // self._page_size], {})
