"""The tensors behind the KV cache: fixed-size pages of keys and values, one pair of tensors a layer.

Pages hold numbers of the model's dtype, or 8-bit floats (e4m3) with a scale for each layer and head, `KVScales`. In
some layers the bounds of their keys lie beside them, for decodes that read a budget of keys; what is done to a page is
done to its bounds.

A page holds `page_size` consecutive tokens of one sequence. Who owns which page is not known here: the engine deals in
page ids, and a *slot* (`page * page_size + offset`) says where one token's key and value live.
"""

from __future__ import annotations

import torch
from longreach_kernels.sizes import KEY_BLOCK
from longreach_kernels.sparse import write_bounds

from longreach_patches.cache.scales import FP8, KVScales
from longreach_patches.cache.shape import PageShape


class KVPages:
    """`num_pages` pages, allocated once: per layer a key and a value tensor (num_pages, page_size, Hkv, D), and in the
    bounded layers the keys' bounds (num_pages, page_size // 16, Hkv, 2, D); None in the others.

    Where layers of several sizes share ids, a layer has as many more pages as its group's stride says, and its own are
    those of ids times the stride. A layer that reads another's keys and values has that layer's tensors here, and
    must not write them."""

    def __init__(self, shape: PageShape, num_pages: int, device: torch.device, scales: KVScales | None = None) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        if (scales is None) != (shape.dtype != FP8):
            raise ValueError(f"scales belong to pages of {FP8} and to no others, got {scales} for {shape.dtype}")
        self.shape = shape
        self.num_pages = num_pages
        # Of each layer's keys and values, or None.
        self.scales: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * shape.num_layers
        if scales is not None:
            self.scales = list(zip(scales.keys, scales.values, strict=True))
        # Behind all pages is one that nobody has, of zeros, where tables of windows say so: see `dropped`.
        rows = num_pages + 1 if shape.divided else num_pages
        # Layers that are alike share a tensor: (layers, 2, num_pages, page_size, Hkv, D). Few models have several.
        self._storage: list[torch.Tensor] = []
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for places, heads, head_dim in _alike(shape, shape.keeping):
            size = (len(places), 2, rows, shape.page_size, heads, head_dim)
            self._storage.append(_room(size, shape.dtype, device))
            for layers, tensor in zip(places, self._storage[-1].unbind(0), strict=True):
                kept |= {layer: (_own(shape, layer, tensor[0]), _own(shape, layer, tensor[1])) for layer in layers}
        sources = [layer.source for layer in shape.layers]
        self.keys: tuple[torch.Tensor, ...] = tuple(kept[source][0] for source in sources)
        self.values: tuple[torch.Tensor, ...] = tuple(kept[source][1] for source in sources)
        self._bounds: list[torch.Tensor] = []
        bounds: dict[int, torch.Tensor] = {}
        for places, heads, head_dim in _alike(shape, shape.keeping_bounds):
            size = (len(places), rows, shape.page_size // KEY_BLOCK, heads, 2, head_dim)
            self._bounds.append(_room(size, shape.dtype, device))
            for layers, tensor in zip(places, self._bounds[-1].unbind(0), strict=True):
                bounds |= {layer: _own(shape, layer, tensor) for layer in layers}
        if shape.divided:
            self.clear([self.dropped])
        self.bounds: tuple[torch.Tensor | None, ...] = tuple(bounds.get(source) for source in sources)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into all pages together."""
        return self.num_pages * self.shape.page_size

    @property
    def dropped(self) -> int:
        """The id that stands in a window's table for pages behind the window, where layers are divided: it holds
        zeros. Kernels read whole tiles, and so beyond a window's edge; what lies there has a weight of 0."""
        return self.num_pages

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._storage[0].device

    @property
    def words_per_page(self) -> int:
        """Words of 8 bytes that one page takes in all layers together; page sizes are multiples of 16 tokens."""
        return self.shape.bytes_per_page // 8

    def keeps(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own, and writes them; else it reads an earlier layer's."""
        return self.shape.layers[layer].source == layer

    def bound_keys(self, layer: int, slots: torch.Tensor, backend: str) -> None:
        """Bring a layer's bounds up to date once its keys have been written to `slots`, if it keeps any."""
        bounds = self.bounds[layer]
        if bounds is not None:
            write_bounds(self.keys[layer], bounds, slots, backend=backend)

    def clear(self, pages: list[int]) -> None:
        """Fill these pages with zeros, in all layers."""
        ids = self._ids(pages)
        for dim, tensors in ((2, self._storage), (1, self._bounds)):
            for tensor in tensors:
                tensor.view(torch.uint8).index_fill_(dim, ids, 0)  # as bytes: not every dtype can be filled

    def read(self, pages: list[int]) -> torch.Tensor:
        """The contents of these pages, in all layers, as a new tensor (len(pages), words_per_page) int64."""
        ids = self._ids(pages)
        parts = [part.index_select(0, ids).flatten(1) for part in self._by_page()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def write(self, pages: list[int], contents: torch.Tensor) -> None:
        """Give pages the `contents` (len(pages), words_per_page) int64 that `read` gave of others of this shape."""
        ids = self._ids(pages)
        by_page = self._by_page()
        widths = [part[0].numel() for part in by_page]
        for part, own in zip(by_page, contents.split(widths, 1), strict=True):
            part.index_copy_(0, ids, own.unflatten(1, part.shape[1:]))

    def _ids(self, pages: list[int]) -> torch.Tensor:
        ids = torch.tensor(pages)
        return ids.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else ids

    def _by_page(self) -> list[torch.Tensor]:
        """All contents: of keys and values (num_pages, 2 * layers, words) for each kind of layer, of bounds, if there
        are any, (num_pages, layers, words), int64: as words, since not every dtype can be indexed."""
        parts = [*(storage.flatten(0, 1) for storage in self._storage), *self._bounds]
        return [part.view(torch.uint8).flatten(2).view(torch.int64).transpose(0, 1) for part in parts]


def _alike(shape: PageShape, indices: tuple[int, ...]) -> list[tuple[list[list[int]], int, int]]:
    """Those of the layers that are alike, in order, with their KV heads and channels: lists of the layers that share a
    place, which are of several groups. Where layers are divided, all are like the largest: see `_own`."""
    found: dict[tuple[int, int], dict[int, list[int]]] = {}
    for index in indices:
        layer = shape.layers[shape.largest if shape.divided else index]
        places = found.setdefault((layer.num_kv_heads, layer.head_dim), {})
        places.setdefault(shape.place_of[index] // shape.stride_of[index], []).append(index)
    return [(list(places.values()), *sizes) for sizes, places in found.items()]


def _own(shape: PageShape, layer: int, room: torch.Tensor) -> torch.Tensor:
    """A layer's pages within `room` (rows, tokens or blocks, heads, ..., D) of one of the largest layers.

    Of a layer of half that size a row holds two pages, one behind the other. Seen as pages of its own size, from the
    layer's first on, they are a contiguous tensor in which the page of an id is at the id times the group's stride.
    """
    own = shape.layers[layer]
    size = (room.shape[1], own.num_kv_heads, *room.shape[3:-1], own.head_dim)
    return room.view(-1, *size)[shape.place_of[layer] % shape.stride_of[layer] :]


def _room(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # On a GPU a tile may read past a sequence's end, into memory never written, and 0 * NaN is NaN. On a CPU
    # nothing does, and memory that is not touched is not used.
    make = torch.empty if device.type == "cpu" else torch.zeros
    # Not every function that fills tensors knows 8-bit floats, whose 0 is the byte 0.
    return make(size, dtype=torch.uint8 if dtype == FP8 else dtype, device=device).view(dtype)
