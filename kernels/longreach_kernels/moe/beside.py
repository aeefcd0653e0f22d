"""Packed weights of experts that are unpacked beside the product before the one that takes them.

A grouped product is bound by the tensor cores, and unpacking by memory. So the weight downwards is unpacked while the
product upwards runs, and the next layer's weight upwards while the product downwards does. A program of the unpacking
kernel fits beside one of the product on each multiprocessor.

The unpacking kernels have a stream of their own. It waits for what the stream of the products had begun before, and the
product that takes a weight waits for it. Memory comes from the products' stream, and goes back there after that wait;
so it is never given to others while it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from longreach_kernels.linear import Weight
from longreach_kernels.moe import sizes
from longreach_kernels.moe.ahead import Taken, UnpackedAhead
from longreach_kernels.moe.experts import Experts
from longreach_kernels.moe.products import unpacked_weight


class Unpacked:
    """A weight of 16 bits that is being made, by `begin`, or is there."""

    def __init__(self, weight: Weight, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = weight
        self._out = torch.empty(weight.shape, dtype=dtype, device=device)
        self._made: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Unpack, on the current stream. It is told apart from the stream that takes the weight by an event."""
        unpacked_weight(self._weight, self._out.dtype, sizes.UNPACKING_PROGRAMS, self._out)
        if self._out.is_cuda:
            self._made = torch.cuda.Event()
            self._made.record()

    def take(self) -> Tensor:
        """The weight, for kernels that the current stream is given from now on."""
        if self._made is not None:
            torch.cuda.current_stream(self._out.device).wait_event(self._made)
            self._made = None
        return self._out


class UnpackedLayer:
    """The weights of a layer, each unpacked once for all products of a call.

    Attributes:
        layer: whose weights are unpacked before products, by one kernel each.
        following: the next layer, if its weight upwards is to be unpacked, too.
    """

    def __init__(self, layer: Experts, following: Experts | None, ahead: UnpackedAhead | None, x: Tensor) -> None:
        self.layer = layer
        self.following = following
        self._ahead = ahead
        self._dtype, self._device = x.dtype, x.device
        self._gate_up: Taken | Tensor | None = None if ahead is None else ahead.take(layer)
        self._down: Unpacked | None = None

    def gate_up(self) -> Tensor:
        """The weight upwards: from before, or unpacked now in as many programs as there may be."""
        if self._gate_up is None:
            self._gate_up = unpacked_weight(self.layer.gate_up, self._dtype)
        elif not isinstance(self._gate_up, Tensor):
            self._gate_up = self._gate_up.take()
        return self._gate_up

    def down(self) -> Tensor:
        """The weight downwards, after `beside_up`."""
        assert self._down is not None, "it is unpacked beside the product upwards"
        return self._down.take()

    @contextmanager
    def beside_up(self) -> Iterator[None]:
        """Beside the products that are begun inside, unpack the weight downwards if it is not there."""
        if self._down is not None:
            yield
            return
        down = Unpacked(self.layer.down, self._dtype, self._device)
        with _beside(self._device, down.begin):
            yield
        self._down = down

    @contextmanager
    def beside_down(self, *, is_last: bool) -> Iterator[None]:
        """Beside the products that are begun inside, the `is_last` ones of a call, unpack for the next layer."""
        if is_last:
            self._gate_up = None  # its memory serves the next layer's
        if self.following is None or self._ahead is None or not is_last:
            yield
            return
        weight = Unpacked(self.following.gate_up, self._dtype, self._device)
        with _beside(self._device, weight.begin):
            yield
        self._ahead.hold(self.following, weight)

    def end(self) -> None:
        """After the call, or an error in it: wait for what has not been taken."""
        for weight in (self._gate_up, self._down):
            if weight is not None and not isinstance(weight, Tensor):
                weight.take()


@contextmanager
def _beside(device: torch.device, work: Callable[[], None]) -> Iterator[None]:
    """Let `work` run beside what is begun inside, and after all that was begun before.

    It is launched later, so that a grouped product takes its place on each multiprocessor first: where two programs of
    the work came before it, there would be no room for it.
    """
    if device.type != "cuda":
        yield
        work()
        return
    side, before = _side_stream(device), torch.cuda.Event()
    before.record(torch.cuda.current_stream(device))
    yield
    side.wait_event(before)
    with torch.cuda.stream(side):
        work()


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
