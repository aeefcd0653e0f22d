"""A model of the model: pages that remember what was written to them, next tokens that depend on the whole prefix.

It stands in for the runner wherever a test is about scheduling, pages or speculation. A row's output is computed from
what its pages hold and from nothing else, so that a page that was handed to the wrong request, written to while shared,
or taken over with other contents gives another stream than `expected_stream`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

from longreach.engine.cost_model import StepCost
from longreach.engine.kv_cache.offload_index import CacheMoves, Copy
from longreach.engine.messages import Generate
from longreach.engine.requests.request import PENDING, Request
from longreach.engine.requests.state_hold import StateSlots
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.engine.sampling.sampler import NOT_A_NUMBER
from longreach.engine.updates import Logprob

Windows = tuple[int | None, ...]
# Whether a model has layers with recurrent states, beside others or alone.
States = Literal["none", "beside", "alone"]
NO_MOVES = CacheMoves([], [], [], [])


def _state(previous: bytes, salt: str, token: int, as_decode: bool = False) -> bytes:
    return hashlib.blake2b(previous + f"{salt}/{token}{'+' * as_decode};".encode(), digest_size=8).digest()


def _next_token(state: bytes, seed: int, vocabulary: int) -> int:
    return hashlib.blake2b(state + seed.to_bytes(9, "big", signed=True), digest_size=2).digest()[0] % vocabulary


def _seen(window: int | None, position: int) -> int:
    """The first position that is read for one: the one before, whose state has all before it, or a window's."""
    return max(0, position - 1) if window is None else max(0, position - window + 1)


def expected_stream(
    spec: Generate, seed: int, vocabulary: int, rounds: bool = False, windows: Windows = (None,)
) -> list[int]:
    """The tokens that a request gets: one after the other, without pages; `rounds` and `windows` as for
    `SimulatedRunner`."""
    kept: list[list[bytes]] = [[] for _ in windows]
    tokens: list[int] = []

    def read(token: int, as_decode: bool = False) -> None:
        for states, window in zip(kept, windows, strict=True):
            seen = states[_seen(window, len(states)) :]
            states.append(_state(b"".join(seen), spec.cache_salt, token, as_decode))

    for token in spec.prompt:
        read(token)
    while len(tokens) < spec.max_tokens:
        tokens.append(_next_token(b"".join(states[-1] for states in kept), seed, vocabulary))
        if tokens[-1] in spec.stop_token_ids and len(tokens) > spec.min_tokens:
            break
        read(tokens[-1], as_decode=rounds)
    return tokens


def _check_slots(slots: list[StateSlots]) -> None:
    """Assert that a step can be computed in any order, and again."""
    written = [slot.write for slot in slots]
    assert len(set(written)) == len(written), "two sequences of a step leave their states in one slot"
    assert not {slot.read for slot in slots}.intersection(written), "a step writes to a slot that it reads"


class SimulatedRunner:
    """Runs plans over simulated pages; `clock` advances by what a step costs, if a cost is given.

    With `overlaps` it behaves as a GPU does: results are taken later than steps are launched. With `rounds` it does as
    one in another way, too: what is computed of a token as a decode is not what is computed of it otherwise.

    `windows` are the groups of its layers. In a full one (None) a token's state depends on the one before, and so on
    all; in a window on the states of all tokens that it sees, itself excluded, which are read from their pages.

    With `states` there are recurrent layers, whose rows depend on the slot that a chunk starts from and on no page:
    beside the others, as one more full group would be, or alone.
    """

    def __init__(
        self,
        page_size: int,
        vocabulary: int = 3,
        cost: StepCost | None = None,
        overlaps: bool = False,
        rounds: bool = False,
        windows: Windows = (None,),
        states: States = "none",
    ) -> None:
        self.overlaps = overlaps
        self._windows = windows
        self._kept = states
        self._states: dict[int, bytes] = {}  # by slot
        self._wrong_slots: set[int] = set()  # that hold what is no number
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
        self.before_move: Callable[[CacheMoves], None] = lambda moves: None
        self.moves = self.copied = 0
        # By the first place: which places, contents, and whether they are no numbers.
        self._host: dict[int, tuple[tuple[int, ...], dict[int, bytes] | bytes, bool]] = {}
        self._late = NO_MOVES
        self._arriving: set[tuple[bool, int]] = set()  # states or pages, and which
        self._leaving: set[tuple[bool, int]] = set()

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
            read, written = self._pages_of(chunk)
            clean = chunk.request.id in self.broken or not self.not_numbers.intersection(read)
            assert clean, "a step reads a page that was to be cleaned"
            slots: tuple[int, ...] = () if chunk.state is None else chunk.state
            reads = {(False, page) for page in read} | {(True, slot) for slot in slots}
            assert self._arriving.isdisjoint(reads), "a step reads what is on its way from the host"
            writes = {(False, page) for page in written} | {(True, slot) for slot in slots[1:]}
            assert self._leaving.isdisjoint(writes), "a step writes to what is on its way to the host"
            tokens = [self._drawn[chunk.request.seq_slot] if token == PENDING else token for token in chunk.token_ids]
            as_decode = self._rounds and chunk.as_decodes
            states = [self._write(chunk.request, chunk.start + i, token, as_decode) for i, token in enumerate(tokens)]
            if self._kept != "none":
                read_states = self._read_state(chunk, tokens)
                alone = self._kept == "alone"
                states = [state if alone else row + state for row, state in zip(states, read_states, strict=True)]
            if chunk.num_draws:
                rows = states[-chunk.num_draws :]
                drawn[chunk.request.id] = [_next_token(row, chunk.request.seed, self._vocabulary) for row in rows]
        _check_slots([chunk.state for chunk in plan.chunks if chunk.state is not None])
        self.after_step(plan)
        for chunk in plan.chunks:
            if chunk.num_draws:
                self._drawn[chunk.request.seq_slot] = drawn[chunk.request.id][-1]
                if chunk.request.id in self.broken:
                    drawn[chunk.request.id] = [NOT_A_NUMBER] * chunk.num_draws
                    self.not_numbers.update(self._pages_of(chunk)[1])
                    self._wrong_slots |= set() if chunk.state is None else {chunk.state.write}

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

    def move(self, moves: CacheMoves) -> None:
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
        self._arriving.update((copy.is_state, copy.at) for copy in moves.restored)
        self._leaving.update((copy.is_state, copy.at) for copy in moves.saved)

    def _copy_late(self) -> None:
        for copy in self._late.restored:
            places, contents, wrong = self._host[copy.places[0]]
            assert places == copy.places, "an entry comes back from other places than it went to"
            if isinstance(contents, bytes):
                assert copy.is_state, "a state comes back to a page"
                self._states[copy.at] = contents
                self._wrong_slots.discard(copy.at)
                self._wrong_slots |= {copy.at} if wrong else set()
            else:
                assert not copy.is_state, "a page comes back to a slot for states"
                self._forget(copy.at)
                self._contents[copy.at] = dict(contents)
                self.not_numbers |= {copy.at} if wrong else set()
        self._save(self._late.saved)
        self._late = NO_MOVES
        self._arriving.clear()
        self._leaving.clear()

    def _save(self, copies: list[Copy]) -> None:
        for copy in copies:
            if copy.is_state:
                contents, wrong = self._states[copy.at], copy.at in self._wrong_slots
            else:
                contents, wrong = dict(self._contents.get(copy.at, {})), copy.at in self.not_numbers
                assert len(contents) == self._page_size, "a page is kept that is not full"
            self.set_host_entry(copy.places, (contents, wrong))

    def host_entry(self, places: tuple[int, ...]) -> tuple[dict[int, bytes] | bytes, bool]:
        """What these places hold, and whether it is no number."""
        there, contents, wrong = self._host[places[0]]
        assert there == places, "an entry lies in other places than it was put to"
        return contents, wrong

    def set_host_entry(self, places: tuple[int, ...], entry: tuple[dict[int, bytes] | bytes, bool]) -> None:
        """Put what `host_entry` gave into these places, in place of all that lay there."""
        for other in [first for first, kept in self._host.items() if not set(kept[0]).isdisjoint(places)]:
            del self._host[other]
        self._host[places[0]] = places, *entry

    def _forget(self, page: int) -> None:
        self._contents.pop(page, None)
        self.not_numbers.discard(page)

    def recover(self) -> None:
        """As `StepRunner.recover`: there is no device that could be lost."""

    def _pages_of(self, chunk: Chunk) -> tuple[list[int], list[int]]:
        """The pages that a chunk reads, and those that it writes to."""
        size, read, written = self._page_size, [], []
        for table, window in zip(chunk.request.hold.tables, self._windows, strict=True):
            first = 0 if window is None else max(0, chunk.start - window + 1) // size
            read += table[first : -(-chunk.end // size)]
            written += table[chunk.start // size : -(-chunk.end // size)]
        return read, written

    def _read_state(self, chunk: Chunk, tokens: list[int]) -> list[bytes]:
        """The states behind each token of a chunk, which goes on from its slot."""
        assert chunk.state is not None, "a step of this model says nothing of slots"
        read, write = chunk.state
        assert read not in self._wrong_slots or chunk.request.id in self.broken, "a step starts from what is no number"
        self._wrong_slots.discard(write)
        state, states = b"" if read < 0 else self._states[read], []
        for token in tokens:
            state = _state(state, chunk.request.spec.cache_salt, token)
            states.append(state)
        self._states[write] = state
        return states

    def _write(self, request: Request, position: int, token: int, as_decode: bool) -> bytes:
        states = []
        for group, window in enumerate(self._windows):
            seen = [self._state_at(request, group, before) for before in range(_seen(window, position), position)]
            states.append(_state(b"".join(seen), request.spec.cache_salt, token, as_decode))
            self._page(request, group, position)[position % self._page_size] = states[-1]
        return b"".join(states)

    def _state_at(self, request: Request, group: int, position: int) -> bytes:
        return self._page(request, group, position)[position % self._page_size]

    def _page(self, request: Request, group: int, position: int) -> dict[int, bytes]:
        page = request.hold.tables[group][position // self._page_size]
        assert page >= 0, "a step reads a page that was dropped"
        return self._contents.setdefault(page, {})
