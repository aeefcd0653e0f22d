"""The least and the greatest of each channel among the keys of 16 tokens, kept beside the pages for decode.

Quest (Tang et al. 2024) keeps them for each page. Here a page holds several *blocks* of 16 tokens, since the bounds of
more keys say little. They are numbers that occur in the pages, and so exact in the pages' own dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.sizes import KEY_BLOCK


def new_bounds(k_pages: Tensor) -> Tensor:
    """Room for the bounds of pages (num_pages, page_size, Hkv, D): (num_pages, page_size // 16, Hkv, 2, D), zeros.

    Raises:
        ValueError: the page size is not a multiple of 16.
    """
    num_pages, page_size, heads, head_dim = k_pages.shape
    if page_size % KEY_BLOCK:
        raise ValueError(f"k_pages: bounds need pages of a multiple of {KEY_BLOCK} tokens, got {page_size}")
    shape = (num_pages, page_size // KEY_BLOCK, heads, 2, head_dim)
    return torch.zeros(shape, dtype=k_pages.dtype, device=k_pages.device)


def write_bounds(k_pages: Tensor, bounds: Tensor, slots: Tensor, *, backend: str = "auto") -> None:
    """Bring bounds up to date, in place, after `write_pages` with the same ``slots``.

    Of a block in which a token was written, the bounds are those of its tokens up to the last one written: a sequence
    fills a page in order, and what lies behind is another's. Does not wait for a GPU.

    Args:
        k_pages: (num_pages, page_size, Hkv, D), contiguous.
        bounds: of `new_bounds`.
        slots: (T,) int64, where tokens were written, in each sequence's order; -1 is skipped.

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    if not k_pages.is_contiguous() or k_pages.dim() != 4:
        raise ValueError(f"k_pages: needs a contiguous (num_pages, page_size, Hkv, D), got {tuple(k_pages.shape)}")
    num_pages, page_size, heads, head_dim = k_pages.shape
    shape = (num_pages, page_size // KEY_BLOCK, heads, 2, head_dim)
    if bounds.shape != shape or bounds.dtype != k_pages.dtype or not bounds.is_contiguous():
        raise ValueError(f"bounds: needs {k_pages.dtype} {shape}, as new_bounds() makes, got {tuple(bounds.shape)}")
    if slots.dtype != torch.int64 or slots.dim() != 1 or slots.device != k_pages.device:
        raise ValueError(f"slots: needs int64 (T,) on {k_pages.device}, got {slots.dtype} {tuple(slots.shape)}")
    if slots.numel() == 0:
        return
    compute = torch.float16 if k_pages.dtype == torch.float8_e4m3fn else k_pages.dtype
    if k_pages.device.type == "cpu" and resolve_backend(backend, "cpu", compute).name != "triton":
        _write_on_cpu(k_pages, bounds, slots)
        return
    from longreach_kernels.sparse.decode.bounds_kernel import launch_bounds

    launch_bounds(k_pages, bounds, slots, KEY_BLOCK)


def _last_of_runs(slots: Tensor) -> Tensor:
    """Which slots are the last written of their block: the next one does not go on in it."""
    following = torch.cat([slots[1:], slots.new_full((1,), -1)])
    return (slots >= 0) & ((following != slots + 1) | ((slots + 1) % KEY_BLOCK == 0))


def _write_on_cpu(k_pages: Tensor, bounds: Tensor, slots: Tensor) -> None:
    ends = slots[_last_of_runs(slots)]
    block = ends // KEY_BLOCK
    keys = k_pages.view(-1, KEY_BLOCK, *k_pages.shape[2:])[block].float()  # (n, 16, Hkv, D)
    written = (torch.arange(KEY_BLOCK) <= (ends % KEY_BLOCK)[:, None])[..., None, None]
    least = keys.masked_fill(~written, float("inf")).amin(1)
    greatest = keys.masked_fill(~written, float("-inf")).amax(1)
    bounds.view(-1, *bounds.shape[2:])[block] = torch.stack([least, greatest], 2).to(bounds.dtype)
