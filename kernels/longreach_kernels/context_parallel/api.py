"""The public entry point: attention of one sequence whose tokens are spread over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from longreach_kernels.call import AttentionCall
from longreach_kernels.checks import attention_call, check_inputs
from longreach_kernels.context_parallel import exchanges
from longreach_kernels.context_parallel.exchanges import Shard
from longreach_kernels.context_parallel.segments import contiguous_sizes
from longreach_kernels.masks.mask import Causal, Mask

_CAUSAL = Causal()
_EXCHANGES: dict[str, Callable[[Shard, AttentionCall, str], tuple[Tensor, Tensor]]] = {
    "ring": exchanges.ring,
    "all_gather": exchanges.all_gather,
    "all_to_all": exchanges.all_to_all,
}


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_tokens: int,
    mask: Mask = ...,
    *,
    exchange: str = ...,
    group: dist.ProcessGroup | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_tokens: int,
    mask: Mask = ...,
    *,
    exchange: str = ...,
    group: dist.ProcessGroup | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_tokens: int,
    mask: Mask = _CAUSAL,
    *,
    exchange: str = "all_to_all",
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of one sequence of N tokens that lie on the R ranks of a process group, n on each.

    Every rank calls it, with the same arguments but for its own shard of q, k and v, and gets the same shard of the
    result. ``"ring"`` and ``"all_gather"`` take zig-zag shards (`zigzag_split`) and any heads; ``"all_to_all"`` takes
    contiguous ones (`contiguous_sizes`) and needs R to divide the key heads. What each moves and holds is derived in
    docs/context-parallel.md. Has no gradient. One sequence at a time: not for decoding, nor for pages.

    Args:
        q: (n, Hq, D), floating point, channels contiguous.
        k, v: (n, Hkv, D), same dtype and device.
        num_tokens: N.
        mask: by positions in the whole sequence, with all heads.
        exchange: ``"ring"``, ``"all_gather"`` or ``"all_to_all"``.
        group: the ranks, the default group if None; NCCL for tensors on GPUs, gloo for those on a CPU.
        scale, softcap, sink_logits, backend: as in `longreach_kernels.attention`; sink_logits of all heads.
        return_lse: also return the log-sum-exp.

    Returns:
        out like q, contiguous; with ``return_lse`` also lse (n, Hq), fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    check_inputs(q, k, v, "k", "v", dims=3, head_axis=1)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(
            "q: context-parallel attention has no gradient; call it under torch.no_grad() or detach its inputs"
        )
    if exchange not in _EXCHANGES:
        raise ValueError(f"exchange: must be one of {', '.join(_EXCHANGES)}, got {exchange!r}")
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group: there are no ranks yet; call torch.distributed.init_process_group first")
    call = attention_call(q, mask, scale, softcap, sink_logits)
    shard = Shard(q, k, v, num_tokens, dist.get_rank(group), dist.get_world_size(group), group)
    _check_shard(shard, exchange)
    out, lse = _EXCHANGES[exchange](shard, call, backend)
    return (out, lse) if return_lse else out


def _check_shard(shard: Shard, exchange: str) -> None:
    if shard.rank < 0:
        raise ValueError("group: this process is not one of its ranks")
    by_heads = exchange == "all_to_all"
    sizes = contiguous_sizes(shard.num_tokens, shard.ranks)
    expected = sizes[shard.rank] if by_heads else sum(part.size for part in shard.segments(shard.rank))
    for name, x in (("q", shard.q), ("k", shard.k)):
        if x.shape[0] != expected:
            raise ValueError(
                f"{name}: rank {shard.rank} of {shard.ranks} has {expected} of {shard.num_tokens} tokens "
                f"{'contiguously' if by_heads else 'in zig-zag order'}, got {x.shape[0]}"
            )
    kv_heads = shard.k.shape[1]
    if by_heads and kv_heads % shard.ranks:
        fitting = ", ".join(str(size) for size in range(1, kv_heads + 1) if kv_heads % size == 0)
        raise ValueError(
            f"group: all_to_all deals out the {kv_heads} key heads, which {shard.ranks} ranks do not divide; "
            f"{fitting} would, or the exchange ring or all_gather"
        )
