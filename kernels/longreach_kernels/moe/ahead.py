"""What a model's mixture layers know of each other: which follows, and a weight that was unpacked ahead for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from longreach_kernels.moe.experts import Experts


class Taken(Protocol):
    """A weight that kernels may take; see `beside.Unpacked`."""

    def take(self) -> Tensor:
        """The weight, for kernels that the current stream is given from now on."""
        ...


class UnpackedAhead:
    """Of a model's mixture layers, in the order of their computation: which follows, and its weight upwards.

    One weight is held at a time. It is taken by its layer, or dropped when another layer asks.
    """

    def __init__(self, layers: Sequence[Experts]) -> None:
        # The last layer may have fewer rows than those before it, so nothing is unpacked ahead of it.
        self._layers = tuple(layers)
        self._following = {id(layer): after for layer, after in pairwise(self._layers[:-1])}
        self._held: tuple[Experts, Taken] | None = None

    def following(self, layer: Experts) -> Experts | None:
        """The layer after this one, whose weight may be unpacked beside its last product; None for none. A CUDA graph
        takes no part: it has to hold all that it waits for."""
        return None if _is_capturing(layer) else self._following.get(id(layer))

    def hold(self, layer: Experts, weight: Taken) -> None:
        """Keep the weight upwards of a layer that comes."""
        self._drop()
        self._held = layer, weight

    def take(self, layer: Experts) -> Taken | None:
        """The weight upwards of a layer, if it is here."""
        if self._held is None or _is_capturing(layer):
            return None
        if self._held[0] is not layer:
            self._drop()
            return None
        weight, self._held = self._held[1], None
        return weight

    def _drop(self) -> None:
        if self._held is not None:
            self._held[1].take()  # its memory may be given away only after it has been written
            self._held = None


def _is_capturing(layer: Experts) -> bool:
    return layer.gate_up.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
