"""The accuracy rule of every kernel test, and makers of inputs."""

from typing import Any

import torch
from longreach_kernels import Mask, PagedBatch, paged_attention
from longreach_kernels.backends.reference import forward as reference
from longreach_kernels.call import AttentionCall
from torch import Tensor

FP8 = torch.float8_e4m3fn


def tolerance(exact: Tensor, eager: Tensor, dtype: torch.dtype, factor: float = 2.0) -> float:
    """What rounding alone excuses: ``factor`` times the error of eager attention in the inputs' own precision, and
    twice what adding and taking away 0.3 does to the exact result (the rule of FlashAttention's own tests)."""
    rounded = exact.to(dtype)
    nudged = (rounded + 0.3 - 0.3 - rounded).abs().max().item() if exact.numel() else 0.0
    worst = (eager.double() - exact).abs().max().item() if exact.numel() else 0.0
    return factor * worst + 2 * nudged


def eager_low_precision(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None, sink_logits: Tensor | None
) -> Tensor:
    """Attention as a plain model computes it: products in the inputs' dtype, softmax in fp32."""
    group = q.shape[1] // k.shape[1]
    num_queries, num_keys = q.shape[2], k.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = mask.allowed(torch.arange(num_keys - num_queries, num_keys), torch.arange(num_keys)).to(q.device)
    if seen.dim() == 3:  # query heads share the mask's heads in runs
        seen = seen.repeat_interleave(q.shape[1] // seen.shape[0], 0)
    scores = scores.float().masked_fill(~seen, float("-inf"))
    if sink_logits is not None:
        sinks = sink_logits.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., :num_keys]
    return weights.to(q.dtype) @ v


def eager_fp8(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None, sink_logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Out and lse in fp64 but for what products of 8-bit floats round: each query, with a scale of its own, and the
    weights, whose largest is 32. k and v are what their pages stand for."""
    step = q.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    q = (q.float() / step).to(torch.float8_e4m3fn).double() * step.double()
    group = q.shape[1] // k.shape[1]
    num_queries, num_keys = q.shape[2], k.shape[2]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = mask.allowed(torch.arange(num_keys - num_queries, num_keys), torch.arange(num_keys)).to(q.device)
    if seen.dim() == 3:
        seen = seen.repeat_interleave(q.shape[1] // seen.shape[0], 0)
    scores = scores.masked_fill(~seen, float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    if sink_logits is not None:
        largest = largest.maximum(sink_logits.double()[:, None, None])
    weights = torch.exp(scores - largest.nan_to_num(neginf=0.0))
    total = weights.sum(-1, keepdim=True)
    if sink_logits is not None:
        total = total + torch.exp(sink_logits.double()[:, None, None] - largest)
    rounded = (weights * 32).float().to(torch.float8_e4m3fn).double() / 32
    lse = (largest + total.log())[..., 0]
    return (rounded @ v / total).nan_to_num(0.0), lse


def check(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> None:
    """Hold out (B, Hq, Nq, D) and lse (B, Hq, Nq) to the fp64 oracle."""
    if scale is None:
        scale = q.shape[-1] ** -0.5
    exact, exact_lse = reference.attention(
        q, k, v, AttentionCall(mask, scale=scale, softcap=softcap, sink_logits=sink_logits), compute_dtype=torch.float64
    )
    eager = eager_low_precision(q, k, v, mask, scale, softcap, sink_logits)
    assert out.dtype == q.dtype
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    allowed = tolerance(exact, eager, q.dtype, factor=3.0 if softcap is not None else 2.0)
    if q.dtype == torch.float32:
        allowed += 1e-6  # exp and sums in another order; eager fp32 is exact where a row sees one key
    error = (out.double() - exact).abs().max().item() if out.numel() else 0.0
    assert error <= allowed, f"out is off by {error:.3g}, {allowed:.3g} allowed ({mask}, {tuple(q.shape)}, {q.dtype})"
    empty = exact_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty), "lse must be -inf exactly where a row sees nothing"
    assert not out.transpose(1, 2)[empty.transpose(1, 2)].any() if empty.any() else True
    largest = exact_lse[~empty].abs().max().item() if (~empty).any() else 0.0
    lse_error = (lse.double() - exact_lse)[~empty].abs().max().item() if (~empty).any() else 0.0
    assert lse_error <= 1e-5 * (1 + largest), f"lse is off by {lse_error:.3g}"


def qkv(
    batch: int,
    heads: int,
    kv_heads: int,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (batch, heads, num_queries, head_dim) and k, v (batch, kv_heads, num_keys, head_dim)."""
    shapes = ((heads, num_queries), (kv_heads, num_keys), (kv_heads, num_keys))
    q, k, v = (torch.randn(batch, *shape, head_dim, device=device).to(dtype) for shape in shapes)
    return q, k, v


def paged(
    query_lens: list[int],
    context_lens: list[int],
    page_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    num_decodes: int = 0,
) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    """Random queries and pages in shuffled order: q (T, heads, head_dim), k_pages, v_pages, batch."""
    columns = max(-(-n // page_size) for n in context_lens) + 1
    order = torch.randperm(columns * len(query_lens) + 2, dtype=torch.int32)
    table = order[: columns * len(query_lens)].view(len(query_lens), columns).contiguous()
    batch = PagedBatch(
        torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        torch.tensor(context_lens, dtype=torch.int32, device=device),
        table.to(device),
        max_seqlen_q=max(query_lens),
        max_context_len=max(context_lens),
        num_decodes=num_decodes,
    )
    k_pages, v_pages = (
        torch.randn(len(order), page_size, kv_heads, head_dim, device=device).to(dtype) for _ in range(2)
    )
    # What lies in pages that belong to nobody, or beyond a sequence's end, may be anything but NaN.
    q = torch.randn(sum(query_lens), heads, head_dim, device=device).to(dtype)
    return q, k_pages, v_pages, batch


def check_paged(
    out: Tensor, lse: Tensor, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, mask: Mask, **options
) -> None:
    """Hold each sequence of a paged batch to the oracle; out (T, Hq, D), lse (T, Hq)."""
    page_size = k_pages.shape[1]
    cu_seqlens = batch.cu_seqlens_q.tolist()
    for b, length in enumerate(batch.context_lens.tolist()):
        rows = slice(cu_seqlens[b], cu_seqlens[b + 1])
        pages = batch.page_table[b, : -(-length // page_size)].long()
        k, v = (x[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (k_pages, v_pages))
        if length == 0:
            assert not out[rows].any()
            continue
        check(out[rows].transpose(0, 1)[None], lse[rows].T[None], q[rows].transpose(0, 1)[None], k, v, mask, **options)


def quantized(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Pages in fp8 and the scales (Hkv,) that take them back."""
    scale = pages.float().abs().amax((0, 1, 3)) / 448
    return (pages.float() / scale[:, None]).to(FP8), scale


def check_fp8(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, mask: Mask, backend: str, **options: Any
) -> None:
    """fp8 pages, held to the rule for the numbers that they stand for, in the precision of the queries."""
    (k8, k_scale), (v8, v_scale) = quantized(k_pages), quantized(v_pages)
    out, lse = paged_attention(
        q, k8, v8, batch, mask, k_scale=k_scale, v_scale=v_scale, backend=backend, return_lse=True, **options
    )
    options["scale"] = q.shape[-1] ** -0.5
    exact, exact_lse = reference.paged_attention(
        q, k8, v8, batch, AttentionCall(mask, kv_scales=(k_scale, v_scale), **options), compute_dtype=torch.float64
    )
    k_low, v_low = (x.float().mul(s[:, None]).to(q.dtype) for x, s in ((k8, k_scale), (v8, v_scale)))
    eager, _ = reference.paged_attention(
        q, k_low, v_low, batch, AttentionCall(mask, **options), compute_dtype=torch.float32
    )
    allowed = tolerance(exact, eager.to(q.dtype), q.dtype)
    if q.dtype == torch.float32:
        allowed += 1e-6  # exp and sums in another order
    error = (out.double() - exact).abs().max().item()
    assert error <= allowed, f"out is off by {error:.3g}, {allowed:.3g} allowed"
    finite = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    largest = exact_lse[finite].abs().max().item()
    assert (lse[finite].double() - exact_lse[finite]).abs().max().item() <= 1e-5 * (1 + largest)
