"""Host memory behind `offload_index.HostIndex`, and the copies between it and the pages and states on the device.

On a GPU the copies have a stream of their own, so that the step that is launched after them does not wait for them.
Each page is gathered from all layers into one piece, which the copy engine then moves at the full speed of the link. A
state's layers are large enough to be moved one by one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch
from longreach_patches import KVPages, StateStore

from longreach.engine.kv_cache.offload_index import CacheMoves, Copy

# Pages are gathered in batches of at most so many bytes of device memory.
_STAGING_BYTES = 64 << 20


class HostStore:
    """`num_places` places in host memory, each for one of `pages`, pinned where the pages are on a GPU; of a model that
    keeps `states`, a state takes several. With the name of a file, another process has the memory, too.

    Raises:
        ValueError: the memory is not to be had; the message names the fix.
    """

    def __init__(
        self, pages: KVPages, num_places: int, states: StateStore | None = None, shared_file: str = ""
    ) -> None:
        self._pages = pages
        self._states = states
        self._batch = max(1, _STAGING_BYTES // pages.shape.bytes_per_page)
        size = num_places * pages.shape.bytes_per_page
        if shared_file:
            self.places = shared_places(shared_file, num_places, pages.words_per_page)
        else:
            try:
                self.places = torch.empty((num_places, pages.words_per_page), dtype=torch.int64)
            except RuntimeError as error:  # torch's own, where the machine does not have so much
                raise _too_much(size) from error
        self._bytes = self.places.view(torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        # The ends of the copies that may still be under way.
        self._ends: deque[torch.cuda.Event] = deque()
        if pages.device.type == "cuda":
            # Not by torch's allocator of pinned memory: it rounds sizes up to a power of two.
            cudart = torch.cuda.cudart()
            assert cudart is not None
            if int(cudart.cudaHostRegister(self.places.data_ptr(), size, 0)) != 0:
                raise _too_much(size)
            # A later allocation at this address could not be registered otherwise; a process that ends need not care.
            weakref.finalize(self, _release, self.places.data_ptr(), pages.device).atexit = False
            self._stream = torch.cuda.Stream(pages.device)

    @torch.inference_mode()
    def move(self, moves: CacheMoves) -> None:
        """As `step_retry.StepRunner.move`."""
        if self._stream is None:
            self._save(moves.evicted)
            self._clear(moves.unclean)
            self._restore(moves.restored)
            self._save(moves.saved)
            return
        compute = torch.cuda.current_stream(self._pages.device)
        if self._ends:
            compute.wait_event(self._ends[-1])
        if moves.evicted:
            with self._beside(compute):
                self._save(moves.evicted)
            compute.wait_stream(self._stream)
        self._clear(moves.unclean)
        if moves.restored or moves.saved:
            with self._beside(compute):
                self._restore(moves.restored)
                self._save(moves.saved)
                end = torch.cuda.Event()
                end.record()
            self._ends.append(end)
            # Where nothing is computed nobody waits for the copies: their number under way is bounded here.
            if len(self._ends) > 2:
                self._ends.popleft().synchronize()

    def contents(self, places: tuple[int, ...]) -> list[memoryview]:
        """The bytes of places, one after another."""
        return [self._bytes[place].numpy().data for place in places]

    def settled(self) -> Callable[[], object]:
        """What waits, in any thread, until all copies that have been issued are made."""
        if self._stream is None:
            return lambda: None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize

    def _beside(self, compute: torch.cuda.Stream) -> torch.cuda.StreamContext:
        """What is launched in this context comes after what has been launched, and beside what comes next."""
        assert self._stream is not None
        self._stream.wait_stream(compute)
        return torch.cuda.stream(self._stream)

    def _clear(self, pages: list[int]) -> None:
        if pages:
            self._pages.clear(pages)

    def _save(self, copies: list[Copy]) -> None:
        """Copy pages and states to their places."""
        for batch in self._batches(copies):
            contents = self._pages.read([copy.at for copy in batch])
            for copy, content in zip(batch, contents, strict=True):
                self.places[copy.places[0]].copy_(content, non_blocking=True)
        for part, place in self._parts(copies):
            place.copy_(part, non_blocking=True)

    def _restore(self, copies: list[Copy]) -> None:
        """Copy pages and states from their places."""
        for batch in self._batches(copies):
            contents = self.places.new_empty((len(batch), self.places.shape[1]), device=self._pages.device)
            for copy, content in zip(batch, contents, strict=True):
                content.copy_(self.places[copy.places[0]], non_blocking=True)
            self._pages.write([copy.at for copy in batch], contents)
        for part, place in self._parts(copies):
            part.copy_(place, non_blocking=True)

    def _batches(self, copies: list[Copy]) -> list[list[Copy]]:
        pages = [copy for copy in copies if not copy.is_state]
        return [pages[start : start + self._batch] for start in range(0, len(pages), self._batch)]

    def _parts(self, copies: list[Copy]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The states among `copies` in parts (n,) uint8 that lie in one piece, on the device and in host memory."""
        size = self._bytes.shape[1]
        for copy in copies:
            if not copy.is_state:
                continue
            assert self._states is not None, "this model keeps no states"
            done = 0
            for part in self._states.parts(copy.at):
                start = 0
                while start < len(part):
                    place, offset = divmod(done + start, size)
                    end = min(len(part), start + size - offset)
                    yield part[start:end], self._bytes[copy.places[place], offset : offset + end - start]
                    start = end
                done += len(part)


def shared_places(file: str, num_places: int, words: int) -> torch.Tensor:
    """Places (num_places, words) int64 of all processes that call this for one file, which is made as long as it takes.

    Raises:
        ValueError: the memory is not to be had; the message names the fix.
    """
    try:
        memory = torch.from_file(file, shared=True, size=num_places * words, dtype=torch.int64)
    except RuntimeError as error:
        raise _too_much(8 * num_places * words) from error
    return memory.view(num_places, words)


def _release(address: int, device: torch.device) -> None:
    """End the pinning of host memory, once no copy uses it."""
    torch.cuda.synchronize(device)
    cudart = torch.cuda.cudart()
    assert cudart is not None
    cudart.cudaHostUnregister(address)


def _too_much(size: int) -> ValueError:
    return ValueError(
        f"{size} bytes of host memory could not be had for the cache; lower --kv-offload-bytes, or raise the limit of "
        "locked memory (ulimit -l)"
    )
