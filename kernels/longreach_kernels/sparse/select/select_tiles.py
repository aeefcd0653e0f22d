"""`select_tiles`: from the queries of a step and the keys in pages to the lists of key tiles worth reading."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.batch import PagedBatch
from longreach_kernels.checks import check_softcap, kv_scale_of, scale_of
from longreach_kernels.masks.tile_lists import TileLists
from longreach_kernels.paged_api import list_tiles
from longreach_kernels.sparse.select import reference
from longreach_kernels.sparse.select.estimators import Antidiagonal, Estimator, Moments, Pooled
from longreach_kernels.sparse.select.lists import ListFrame, edge_frame, lists_of_choice
from longreach_kernels.sparse.select.mass_floor import FloorCounts, MassFloor, raised
from longreach_kernels.sparse.select.query_tiles import QueryTiles, query_tiles
from longreach_kernels.sparse.select.reference import Logits
from longreach_kernels.sparse.select.targets import (
    Density,
    Recall,
    Speedup,
    Target,
    Threshold,
    choose,
    density_of,
)

_ANTIDIAGONAL = Antidiagonal()
# Where dense attention takes no longer than a choice and what is chosen: of 8,192 tokens 1.0 ms in a layer of a Llama
# with 8 billion parameters (H200).
DENSE_BELOW = 8192
# Recalls of the estimate that are tried, one after another, where a choice keeps too little of the mass.
WIDER = (0.98, 0.998)


@dataclass(frozen=True, eq=False)
class TilePlan:
    """What a choice of key tiles takes from the batch alone. `plan_tiles` makes it, once for all layers of a step.

    Attributes:
        batch: the batch, whose tensors must stay as they were.
        frame: where the lists go; its tiles are the query tiles.
        visible: (Q, K) bool, the key tiles that a query tile may see.
        forced: (Q, K) bool, those that it keeps whatever their mass.
        all_kept: whether the batch is so short that everything is kept.
    """

    batch: PagedBatch
    frame: ListFrame
    visible: Tensor
    forced: Tensor
    all_kept: bool


@torch.no_grad()
def plan_tiles(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    *,
    window: int | None = None,
    prompt_lens: Tensor | None = None,
    local: int = 512,
    tail: int = 512,
    dense_below: int = DENSE_BELOW,
    backend: str = "auto",
) -> TilePlan:
    """What `choose_tiles` needs beside queries and keys, of which only shapes, dtypes and devices count here.

    Args and errors are those of `select_tiles`.
    """
    _check(q, k_pages, batch, window, prompt_lens)
    for name, value in (("local", local), ("tail", tail), ("dense_below", dense_below)):
        if value < 0:
            raise ValueError(f"{name}: must be at least 0 tokens, got {value}")
    tiles = query_tiles(batch, q.shape[0], *list_tiles(q, k_pages, backend=backend), window)
    prompt_lens = batch.context_lens if prompt_lens is None else prompt_lens
    return TilePlan(
        batch=batch,
        frame=edge_frame(tiles, k_pages.shape[2]),
        visible=tiles.visible(),
        forced=forced_tiles(tiles, prompt_lens, local, tail, dense_below),
        all_kept=batch.max_context_len <= dense_below,
    )


@torch.no_grad()
def choose_tiles(
    q: Tensor,
    k_pages: Tensor,
    plan: TilePlan,
    *,
    target: Target,
    estimator: Estimator = _ANTIDIAGONAL,
    scale: float | None = None,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    backend: str = "auto",
) -> TileLists:
    """As `select_tiles`, with a plan that was made before.

    Args:
        q, k_pages: of the shapes, dtypes and device that the plan was made for.
        plan: made by `plan_tiles`, for the same backend.
        target, estimator, scale, softcap, k_scale, backend: as in `select_tiles`.

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    logits, kernels = _checked_choice(q, k_pages, plan, target, estimator, scale, softcap, k_scale, backend)
    if plan.all_kept:
        return lists_of_choice(plan.visible.expand(plan.frame.heads, -1, -1), plan.frame, kernels=kernels)
    mass = masses(q, k_pages, plan.batch, plan.frame.tiles, logits, estimator, backend)
    return lists_of_masses(mass, plan, _counted(target, estimator, plan), kernels=kernels)


@torch.no_grad()
def choose_above(
    q: Tensor,
    k_pages: Tensor,
    plan: TilePlan,
    floor: MassFloor,
    *,
    target: Target,
    estimator: Estimator = _ANTIDIAGONAL,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    k_scale: Tensor | None = None,
    backend: str = "auto",
) -> tuple[TileLists, FloorCounts]:
    """As `choose_tiles`, with a floor under the mass that a few drawn queries of each tile keep (`mass_floor`).

    Args:
        floor: what a drawn query keeps at least.
        sink_logits: (Hq,) of a learned sink, whose weight counts as kept.

    Returns:
        The lists, and what the test of the drawn queries found.

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    logits, kernels = _checked_choice(q, k_pages, plan, target, estimator, scale, softcap, k_scale, backend)
    batch, tiles = plan.batch, plan.frame.tiles
    if tiles.window is not None:
        raise ValueError(f"floor: is of layers that see everything, got a plan with a window of {tiles.window}")
    mass = masses(q, k_pages, batch, tiles, logits, estimator, backend)
    choices = [kept_of_masses(mass, plan, _counted(target, estimator, plan), kernels=kernels)]
    for share in WIDER:
        choices.append(choices[-1] | kept_of_masses(mass, plan, Recall(share), kernels=kernels))
    seen = q, k_pages, batch, tiles, logits, sink_logits
    keep, counts = raised(choices, plan.visible, plan.forced, floor, *seen, plain=not kernels)
    return lists_of_choice(keep, plan.frame, kernels=kernels), counts


def _counted(target: Target, estimator: Estimator, plan: TilePlan) -> Recall | Density | Threshold:
    """The target, as a density where it is a speed-up."""
    return density_of(target, estimator.cost(plan.frame.tiles.tile_k)) if isinstance(target, Speedup) else target


def _checked_choice(
    q: Tensor,
    k_pages: Tensor,
    plan: TilePlan,
    target: Target,
    estimator: Estimator,
    scale: float | None,
    softcap: float | None,
    k_scale: Tensor | None,
    backend: str,
) -> tuple[Logits, bool]:
    """What makes logits, and whether Triton kernels choose.

    Raises:
        ValueError: an argument does not fit.
    """
    batch, tiles = plan.batch, plan.frame.tiles
    _check(q, k_pages, batch, tiles.window, None)
    made = (tiles.tile_q, tiles.tile_k), plan.frame.heads, len(tiles.seq)
    slots = q.shape[0] // tiles.tile_q + batch.size
    if made != (list_tiles(q, k_pages, backend=backend), k_pages.shape[2], slots):
        raise ValueError(
            f"plan: is of {len(tiles.seq)} slots of {tiles.tile_q} queries and {plan.frame.heads} heads, which do not "
            "fit q, k_pages and backend: give plan_tiles the same ones"
        )
    if not isinstance(target, (Recall, Density, Speedup, Threshold)):
        raise ValueError(f"target: needs Recall, Density, Speedup or Threshold, got {target!r}")
    if not isinstance(estimator, (Antidiagonal, Moments, Pooled)):
        raise ValueError(f"estimator: needs Antidiagonal(), Moments() or Pooled(), got {estimator!r}")
    factor = scale_of(q, scale)
    check_softcap(softcap)
    logits = Logits(factor, softcap, kv_scale_of(k_pages, "k_scale", k_scale))
    return logits, not _is_plain(backend, q)


@torch.no_grad()
def select_tiles(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    *,
    target: Target,
    estimator: Estimator = _ANTIDIAGONAL,
    scale: float | None = None,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    window: int | None = None,
    prompt_lens: Tensor | None = None,
    local: int = 512,
    tail: int = 512,
    dense_below: int = DENSE_BELOW,
    backend: str = "auto",
) -> TileLists:
    """Choose the key tiles that each query tile of a step reads, one list for each KV head and all query heads of it.

    Always kept, wherever they can be seen at all: the first key tile, the tiles of the ``local`` keys before a query
    tile, all keys of a query tile that begins before ``dense_below`` or ends in the ``tail`` of its prompt or after it.
    So a sequence that is writing its answer attends to everything.

    What a query tile keeps depends on its own queries and the keys before its end, and on nothing else in the batch. If
    chunks begin at multiples of the tile (`list_tiles`), it does not depend on how the prompt was cut into chunks
    either. The new tokens' keys must be in their pages already. Nothing waits for the device, except on a CPU.

    Args:
        q: (T, Hq, D), the queries of all sequences laid end to end.
        k_pages: (num_pages, page_size, Hkv, D), in the dtype of q or float8_e4m3fn.
        batch: as in `paged_attention`; its ``max_context_len`` bounds the memory of the lists.
        target: how much is kept: `Recall`, `Density`, `Speedup` or `Threshold`.
        estimator: `Antidiagonal`, `Moments` or `Pooled`.
        scale, softcap: as in `paged_attention`.
        k_scale: (Hkv,) fp32, of fp8 pages.
        window: keys that a query sees, itself counted, for layers with a sliding window; the lists keep to it.
        prompt_lens: (B,) int32 on the device of q, tokens of each prompt when it is read to its end; by default the
            context lengths, as if each prompt ended with this step.
        local, tail, dense_below: tokens, at least 0.
        backend: as in `paged_attention`, which the lists are for.

    Returns:
        Lists for `paged_attention`, with Hkv heads. Their ``start[-1]`` is the number of key tiles in them.

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    plan = plan_tiles(
        q,
        k_pages,
        batch,
        window=window,
        prompt_lens=prompt_lens,
        local=local,
        tail=tail,
        dense_below=dense_below,
        backend=backend,
    )
    return choose_tiles(
        q,
        k_pages,
        plan,
        target=target,
        estimator=estimator,
        scale=scale,
        softcap=softcap,
        k_scale=k_scale,
        backend=backend,
    )


def lists_of_masses(mass: Tensor, plan: TilePlan, target: Recall | Density | Threshold, *, kernels: bool) -> TileLists:
    """The lists of what `targets.choose` keeps; with ``kernels`` Triton's make them, with the same result."""
    return lists_of_choice(kept_of_masses(mass, plan, target, kernels=kernels), plan.frame, kernels=kernels)


def kept_of_masses(mass: Tensor, plan: TilePlan, target: Recall | Density | Threshold, *, kernels: bool) -> Tensor:
    """(Hkv, Q, K) bool: what `targets.choose` keeps; with ``kernels`` Triton's say it, with the same result."""
    if kernels and isinstance(target, Recall) and target.share < 1:
        from longreach_kernels.sparse.select.list_kernels import choose_recall

        return choose_recall(mass, plan.visible, plan.forced, target.share)
    return choose(mass, plan.visible, plan.forced, target)


def _is_plain(backend: str, q: Tensor) -> bool:
    """Whether the backend computes without kernels of ours."""
    return resolve_backend(backend, q.device, q.dtype).name in ("cpu", "reference")


def masses(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    tiles: QueryTiles,
    logits: Logits,
    estimator: Estimator,
    backend: str,
) -> Tensor:
    """(Hkv, Q, S, K) int32, the estimated mass of each key tile for each strip of queries, in `targets.PARTS`."""
    plain = _is_plain(backend, q)
    given = (q, k_pages, batch, tiles, logits)
    if isinstance(estimator, Antidiagonal):
        if plain:
            return reference.antidiagonal_mass(*given, estimator.stride)
        from longreach_kernels.sparse.select.antidiagonal import antidiagonal_mass

        return antidiagonal_mass(*given, estimator.stride)
    # A tile of the specification's, or of the interpreter's, may be smaller than a block.
    block = min(estimator.block, tiles.tile_k) if isinstance(estimator, Moments) else None
    if not plain:
        from longreach_kernels.sparse.select.pooled_launch import pooled_mass

        return pooled_mass(*given, block)
    return reference.pooled_mass(*given) if block is None else reference.moments_mass(*given, block)


def forced_tiles(tiles: QueryTiles, prompt_lens: Tensor, local: int, tail: int, dense_below: int) -> Tensor:
    """(Q, K) bool: tiles that are kept whatever their mass, if they are visible."""
    starts = tiles.key_starts
    dense = (tiles.first < dense_below) | (tiles.last >= prompt_lens.long()[tiles.seq] - tail)
    near = starts + tiles.tile_k > (tiles.first - local)[:, None]
    return dense[:, None] | near | (starts == 0)


def _check(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    window: int | None,
    prompt_lens: Tensor | None,
) -> None:
    if q.dim() != 3 or not q.dtype.is_floating_point or q.stride(-1) != 1:
        raise ValueError(f"q: needs floating point (T, Hq, D) with contiguous channels, got {q.dtype} {tuple(q.shape)}")
    if k_pages.dim() != 4 or k_pages.shape[3] != q.shape[2] or k_pages.stride(-1) != 1:
        raise ValueError(
            f"k_pages: needs (num_pages, page_size, Hkv, {q.shape[2]}) with contiguous channels, "
            f"got {tuple(k_pages.shape)}"
        )
    if k_pages.dtype not in (q.dtype, torch.float8_e4m3fn):
        raise ValueError(f"k_pages: needs the dtype of q, {q.dtype}, or float8_e4m3fn, got {k_pages.dtype}")
    if k_pages.shape[2] == 0 or q.shape[1] % k_pages.shape[2]:
        raise ValueError(f"k_pages: {q.shape[1]} query heads are not a multiple of its {k_pages.shape[2]} heads")
    for name, x in (("k_pages", k_pages), ("batch", batch.context_lens)):
        if x.device != q.device:
            raise ValueError(f"{name}: needs the device of q, {q.device}, got {x.device}")
    if window is not None and window < 1:
        raise ValueError(f"window: must be at least 1, the query itself, or None, got {window}")
    if prompt_lens is not None and (
        prompt_lens.dtype != torch.int32
        or prompt_lens.shape != batch.context_lens.shape
        or prompt_lens.device != q.device
    ):
        raise ValueError(
            f"prompt_lens: needs int32 ({batch.size},) on {q.device}, "
            f"got {prompt_lens.dtype} {tuple(prompt_lens.shape)} on {prompt_lens.device}"
        )
