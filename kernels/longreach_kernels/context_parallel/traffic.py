"""Bytes that a rank sends in one layer, by exchange, to the byte where R divides the tokens.

A chunk of N new tokens, and C tokens before it whose keys lie in a cache; Hq and Hkv heads of D channels, elements of
``itemsize`` bytes. What a rank receives is as much as what it sends.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """Heads of one layer's attention, and the bytes of one number."""

    queries: int
    keys: int
    dim: int
    itemsize: int = 2


def ring_bytes(heads: Heads, ranks: int, tokens: int, cached: int = 0) -> int:
    """Keys and values of N + C tokens, a rank's share of them passed on R - 1 times."""
    return (ranks - 1) * (tokens + cached) // ranks * 2 * heads.keys * heads.dim * heads.itemsize


def all_gather_bytes(heads: Heads, ranks: int, tokens: int, cached: int = 0) -> int:
    """A rank's share of the keys and values of N + C tokens, to R - 1 others: as many bytes as in a ring."""
    return ring_bytes(heads, ranks, tokens, cached)


def all_to_all_bytes(heads: Heads, ranks: int, tokens: int) -> int:
    """Queries, keys and values of N / R tokens in their heads' direction, and the results of Hq / R heads back; each
    rank keeps what is its own. Cached keys stay where they are."""
    numbers = (2 * heads.queries + 2 * heads.keys) * heads.dim
    return tokens * numbers * (ranks - 1) // ranks**2 * heads.itemsize


def tensor_parallel_bytes(hidden: int, ranks: int, tokens: int, itemsize: int = 2) -> int:
    """For comparison, tensor parallelism: the sums of N rows of the residual stream over all ranks, after attention and
    after the MLP, each as a reduce-scatter and an all-gather."""
    return 2 * 2 * tokens * hidden * (ranks - 1) // ranks * itemsize
