"""Three ways to bring a rank's queries and the keys that they see together.

Ring (Liu, Zaharia, Abbeel, *Ring Attention with Blockwise Transformers*, 2023): keys and values go round, and each rank
adds its queries' attention to the part that passes. All-gather (as in Llama 3's training, 2024): every rank gets all
keys and values at once. All-to-all by heads (DeepSpeed-Ulysses, 2023): every rank gets all tokens of some heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from longreach_kernels.backends.merge_lse import merge
from longreach_kernels.call import AttentionCall
from longreach_kernels.context_parallel.heads import heads_to_tokens, tokens_to_heads
from longreach_kernels.context_parallel.pieces import is_causal, piece_mask
from longreach_kernels.context_parallel.segments import Segment, contiguous_sizes, zigzag_join, zigzag_segments
from longreach_kernels.dispatch import run
from longreach_kernels.masks.head_slices import head_slice


@dataclass(frozen=True)
class Shard:
    """One rank's part of a sequence: q (n, Hq, D), k and v (n, Hkv, D), of `num_tokens`, rank `rank` of `ranks`."""

    q: Tensor
    k: Tensor
    v: Tensor
    num_tokens: int
    rank: int
    ranks: int
    group: dist.ProcessGroup | None

    def segments(self, rank: int) -> tuple[Segment, Segment]:
        """The zig-zag blocks of a rank."""
        return zigzag_segments(self.num_tokens, self.ranks, rank)


class _SegmentAttention:
    """The attention of a segment of queries, joined part by part as keys come by."""

    def __init__(self, q: Tensor, segment: Segment, call: AttentionCall, backend: str) -> None:
        self._q = q.transpose(0, 1)[None]
        self._segment = segment
        self._mask = call.mask
        self._call = call
        self._backend = backend
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, segment: Segment) -> None:
        """Attend to the keys and values (m, Hkv, D) of a segment as well, if the mask lets any through."""
        mask = piece_mask(self._mask, self._segment, segment)
        if mask is None:
            return
        keys, values = (x.transpose(0, 1)[None] for x in (k, v))
        out, lse = run(self._q, keys, values, None, replace(self._call, mask=mask), self._backend)
        self._call = replace(self._call, sink_logits=None)  # a learned sink joins the denominator once
        if self._out is None or self._lse is None:
            self._out, self._lse = out[0].to(self._q.dtype), lse[0]
        else:
            self._out, self._lse = merge(self._out, self._lse, out[0].to(self._q.dtype), lse[0])

    def result(self) -> tuple[Tensor, Tensor]:
        """out (n, H, D) and lse (n, H)."""
        if self._out is None or self._lse is None:
            assert not self._segment.size, "no mask hides a segment's own keys altogether"
            out = self._q[0].transpose(0, 1)
            return out, out.new_empty(out.shape[:2], dtype=torch.float32)
        return self._out.transpose(0, 1).to(self._q.dtype), self._lse.transpose(0, 1)


def ring(shard: Shard, call: AttentionCall, backend: str) -> tuple[Tensor, Tensor]:
    """Zig-zag shards; keys and values of rank - s in step s, the next ones on their way meanwhile."""
    own = shard.segments(shard.rank)
    queries = shard.q.split([part.size for part in own])
    rows = [_SegmentAttention(q, part, call, backend) for q, part in zip(queries, own, strict=True)]
    here = torch.stack([shard.k, shard.v])
    for step in range(shard.ranks):
        parts = shard.segments((shard.rank - step) % shard.ranks)
        coming, works = here, []
        if step + 1 < shard.ranks:
            after = shard.segments((shard.rank - step - 1) % shard.ranks)
            coming = here.new_empty(2, sum(part.size for part in after), *here.shape[2:])
            works = _pass_on(here, coming, shard)
        keys, values = (x.split([part.size for part in parts]) for x in here)
        for row in rows:
            for k, v, part in zip(keys, values, parts, strict=True):
                row.add(k, v, part)
        for work in works:
            work.wait()
        here = coming
    return _joined(rows)


def _pass_on(here: Tensor, coming: Tensor, shard: Shard) -> list[dist.Work]:
    """Send to the next rank and receive from the one before, without waiting."""
    towards, back = (shard.rank + 1) % shard.ranks, (shard.rank - 1) % shard.ranks
    send = dist.P2POp(dist.isend, here, group=shard.group, group_peer=towards)
    receive = dist.P2POp(dist.irecv, coming, group=shard.group, group_peer=back)
    return dist.batch_isend_irecv([send, receive])


def all_gather(shard: Shard, call: AttentionCall, backend: str) -> tuple[Tensor, Tensor]:
    """Zig-zag shards; all keys and values on every rank."""
    own = shard.segments(shard.rank)
    sizes = [sum(part.size for part in shard.segments(rank)) for rank in range(shard.ranks)]
    # Gathered tensors must be of one size: shards that are a token short carry one that is dropped.
    padded = shard.k.new_empty(2, max(sizes), *shard.k.shape[1:])
    padded[0, : sizes[shard.rank]], padded[1, : sizes[shard.rank]] = shard.k, shard.v
    padded[:, sizes[shard.rank] :] = 0
    everyone = padded.new_empty(shard.ranks, *padded.shape)
    dist.all_gather(list(everyone.unbind(0)), padded, group=shard.group)
    keys, values = (zigzag_join([everyone[rank, kind, :size] for rank, size in enumerate(sizes)]) for kind in (0, 1))
    rows = []
    for q, part in zip(shard.q.split([part.size for part in own]), own, strict=True):
        row = _SegmentAttention(q, part, call, backend)
        seen = part.end if is_causal(call.mask) else shard.num_tokens
        row.add(keys[:seen], values[:seen], Segment(0, seen))
        rows.append(row)
    return _joined(rows)


def all_to_all(shard: Shard, call: AttentionCall, backend: str) -> tuple[Tensor, Tensor]:
    """Contiguous shards; every rank computes all tokens of its own heads."""
    heads, kv_heads = shard.q.shape[1] // shard.ranks, shard.k.shape[1] // shard.ranks
    first = shard.rank * heads
    sizes = contiguous_sizes(shard.num_tokens, shard.ranks)
    everything = tokens_to_heads((shard.q, shard.k, shard.v), sizes, shard.group)
    q, k, v = (x.transpose(0, 1)[None] for x in everything.split([heads, kv_heads, kv_heads], 1))
    sinks = None if call.sink_logits is None else call.sink_logits[first : first + heads]
    mask = head_slice(call.mask, shard.q.shape[1], range(first, first + heads))
    out, lse = run(q, k, v, None, replace(call, mask=mask, sink_logits=sinks), backend)
    back = partial(heads_to_tokens, sizes=sizes, group=shard.group)
    return back(out[0].to(q.dtype).transpose(0, 1).contiguous()), back(lse[0].T[..., None].contiguous())[..., 0]


def _joined(rows: list[_SegmentAttention]) -> tuple[Tensor, Tensor]:
    outs, lses = zip(*(row.result() for row in rows), strict=True)
    return torch.cat(outs), torch.cat(lses)
