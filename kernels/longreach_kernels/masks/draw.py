"""Small pictures of masks, as text and as PNG."""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor

from longreach_kernels.masks.mask import Mask


def coverage(mask: Mask, num_queries: int, num_keys: int, *, size: int = 64, head: int = 0) -> Tensor:
    """Share of visible pairs in each cell of a picture, rows are queries: fp32 (h, w), neither above ``size``."""
    q = torch.arange(num_keys - num_queries, num_keys)
    seen = mask.allowed(q, torch.arange(num_keys))
    seen = (seen if seen.dim() == 2 else seen[head]).float()
    return torch.nn.functional.adaptive_avg_pool2d(seen[None], (min(size, num_queries), min(size, num_keys)))[0]


def to_text(mask: Mask, num_queries: int, num_keys: int, *, size: int = 32, head: int = 0) -> str:
    """Draw a mask in characters: ``#`` all visible, ``+`` some, ``.`` none; one line for each row of the picture."""
    cells = coverage(mask, num_queries, num_keys, size=size, head=head)
    return "\n".join("".join("#" if x == 1 else "+" if x > 0 else "." for x in row) for row in cells.tolist())


def to_png(mask: Mask, num_queries: int, num_keys: int, *, size: int = 256, head: int = 0) -> bytes:
    """Draw a mask as the bytes of a grey PNG: dark where queries (down) see keys (across)."""
    return grey_png(coverage(mask, num_queries, num_keys, size=size, head=head))


def grey_png(cells: Tensor) -> bytes:
    """Shares (h, w), 0 to 1, as the bytes of a grey PNG: the darker the larger."""
    grey = (255 - cells * 225).round().to(torch.uint8)
    height, width = grey.shape
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), grey], dim=1)  # each row begins with its filter, none

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes(rows.flatten().tolist()), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
