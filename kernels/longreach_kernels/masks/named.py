"""Attention policies by name: what a mask is made of when its sizes come from outside, in tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longreach_kernels.masks.block_rules import BLOCK, BigBird, LocalGlobal, Strided, VerticalSlash
from longreach_kernels.masks.mask import Causal, Mask, Window


def blocks(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK)


def _strided(stride: int, per_head: bool) -> Mask:
    return Strided(blocks(stride), per_head)


def _local_global(window: int, global_tokens: int) -> Mask:
    return LocalGlobal(blocks(window), blocks(global_tokens))


def _bigbird(window: int, global_tokens: int, random_blocks: int, seed: int) -> Mask:
    return BigBird(blocks(window), blocks(global_tokens), random_blocks, seed)


def _vertical_slash(verticals: tuple[int, ...], slashes: tuple[int, ...]) -> Mask:
    return VerticalSlash(tuple(verticals), tuple(slashes))


_MAKERS: dict[str, Callable[..., Mask]] = {
    "dense": Causal,
    "window": Window,
    "a_shape": lambda sinks, window: Window(window, sinks),
    "strided": _strided,
    "local_global": _local_global,
    "bigbird": _bigbird,
    "vertical_slash": _vertical_slash,
}


def policy_mask(name: str, **parameters: Any) -> Mask:
    """The causal mask of a static policy.

    Args:
        name: ``dense``, ``window``, ``a_shape``, ``strided``, ``local_global``, ``bigbird`` or ``vertical_slash``.
        parameters: all of the policy's own, in tokens where they are sizes; block patterns round them up to blocks.

    Raises:
        ValueError: there is no such policy, or a size is impossible.
        TypeError: a parameter is missing or not one of the policy's.
    """
    if name not in _MAKERS:
        raise ValueError(f"policy: {name!r} is none of {', '.join(_MAKERS)}")
    return _MAKERS[name](**parameters)
