"""The methods that are compared, each with what it needs to be run and predicted.

Sizes are those that keep about 1,024 keys for a query where a method has a choice, and otherwise those of the papers:
256 random features (Performer) and projected rows (Linformer), 4 rounds of hashes over chunks of 64 (Reformer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from longreach_kernels import Causal, Mask, Window, attention
from longreach_kernels.analysis.io_model import Tiles, flash1, flash1_tiles, flash2, standard
from longreach_kernels.analysis.work import Work, work
from longreach_kernels.masks.block_rules import BigBird, LocalGlobal, Strided
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_methods.kernelized import linear_transformer, performer
from benchmarks.attention_methods.linformer import linformer
from benchmarks.attention_methods.reformer import reformer

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

SRAM = 227 << 10  # bytes that a block may have on an H100 or H200
TILES = Tiles(128, 128)


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        name: as tables call it.
        paper: where it comes from.
        attend: q, k, v (B, H, N, D) -> out like q; None where there is only a prediction.
        traffic: (N, D) -> bytes that one head moves, forward, by `longreach_kernels.analysis.io_model`; None where that
            has no such algorithm.
        mask: what our kernels are given, if it is one of theirs.
        causal: whether it computes causal attention, or attention to everything.
        shared_qk: whether keys are the queries, normalised (`reformer.shared_keys`).
        pretrained: whether it is put into the pretrained model: not what computes the same as another entry, nor what
            cannot stand in causal attention with keys of its own.
    """

    name: str
    paper: str
    attend: Attend | None
    traffic: Callable[[int, int], int] | None = None
    mask: Mask | None = None
    causal: bool = True
    shared_qk: bool = False
    pretrained: bool = False


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(QKᵀ / sqrt(D)) V with every intermediate in memory, as eager model code has it. (B, H, N, D) each."""
    length = q.shape[2]
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The FlashAttention-2 that is part of torch; an error where that does not run. (B, H, N, D) each."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def work_of(mask: Mask, n: int, d: int) -> Work:
    """Exact counts of one head under a mask, in tiles of 128 x 128."""
    return work(mask, n, n, d, tile_q=TILES.rows, tile_k=TILES.columns)


def flash1_causal(n: int, d: int) -> int:
    """Bytes of FlashAttention-1, forward, over the tiles that a causal mask leaves."""
    tiles = flash1_tiles(d, SRAM)
    rows = -(-n // tiles.rows)
    visited = sum(rows - start // tiles.rows for start in range(0, n, tiles.columns))
    return flash1(n, d, tiles, visited=visited).total


def _flash2(mask: Mask) -> Callable[[int, int], int]:
    return lambda n, d: flash2(n, d, TILES, visited=work_of(mask, n, d).tiles).total


def _ours(name: str, paper: str, mask: Mask) -> Method:
    return Method(name, paper, lambda q, k, v: attention(q, k, v, mask), _flash2(mask), mask, pretrained=True)


METHODS: tuple[Method, ...] = (
    Method("standard", "Vaswani et al. 2017", standard_attention, lambda n, d: standard(n, d).total),
    Method("FlashAttention-1", "Dao et al. 2022", None, flash1_causal),
    Method("FlashAttention-2 (torch)", "Dao 2023", flash_attention_2, _flash2(Causal())),
    _ours("longreach", "Dao 2023, Shah et al. 2024", Causal()),
    _ours("window 1024+4", "Xiao et al. 2023", Window(1024, 4)),
    _ours("Sparse Transformer", "Child et al. 2019", Strided(stride=8)),
    _ours("Longformer", "Beltagy et al. 2020", LocalGlobal(window=8, global_blocks=1)),
    _ours("BigBird", "Zaheer et al. 2020", BigBird(window=4, global_blocks=1, random_blocks=3, seed=0)),
    Method("Linformer", "Wang et al. 2020", linformer, causal=False),
    Method("Linear Transformer", "Katharopoulos et al. 2020", linear_transformer, pretrained=True),
    Method("Performer", "Choromanski et al. 2021", performer, pretrained=True),
    Method("Reformer", "Kitaev et al. 2020", reformer, shared_qk=True),
)


def chosen(names: str | None) -> tuple[Method, ...]:
    """The methods named, with commas between them, or all.

    Raises:
        ValueError: there is no such method.
    """
    if names is None:
        return METHODS
    known = {method.name: method for method in METHODS}
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"--methods: {', '.join(unknown)}: choose from {', '.join(known)}")
    return tuple(known[name] for name in wanted)
