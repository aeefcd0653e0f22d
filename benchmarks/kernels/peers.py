"""The attention implementations that ours is measured beside. Each turns a case into a function to time, or declines.

A peer gets what it likes best: keys repeated for the query heads beforehand where it knows no groups, its own layout,
and compilation before the clock runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from longreach_kernels import Causal, Full, PagedBatch, Window, attention, paged_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.cases import Case

Run = Callable[[], object]
PAGE = 128


@dataclass(frozen=True)
class Peer:
    """`prepare` makes the function to time, or returns None where the peer cannot compute the case."""

    name: str
    prepare: Callable[[Case], Run | None]


def inputs(case: Case, *, repeat_kv: bool = False, token_major: bool = False) -> tuple[torch.Tensor, ...]:
    """Random bf16 q (B, Hq, N, D), k and v (B, Hkv, N, D), or (B, N, H, D) each when `token_major`."""
    heads_kv = case.Hq if repeat_kv else case.Hkv
    made = []
    for heads in (case.Hq, heads_kv, heads_kv):
        shape = (case.B, case.N, heads, case.D) if token_major else (case.B, heads, case.N, case.D)
        made.append(torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=case.kind == "backward"))
    return tuple(made)


def _forward_or_backward(case: Case, compute: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...]) -> Run:
    if case.kind == "forward":
        return compute
    out = compute()
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def ours(backend: str) -> Peer:
    """This library's kernels, by backend."""

    def prepare(case: Case) -> Run | None:
        if case.kind == "decode":
            return _graphed(_paged(case, backend))
        if case.fp8:
            return _paged(case, backend)
        q, k, v = inputs(case)
        return _forward_or_backward(case, lambda: attention(q, k, v, case.mask, backend=backend), (q, k, v))

    return Peer(f"longreach {backend}", prepare)


def _paged(case: Case, backend: str) -> Run:
    """Decodes, or prefills of whole prompts, over pages in random order."""
    pages = case.N // PAGE
    queries = 1 if case.kind == "decode" else case.N
    k_pages, v_pages = (
        torch.randn(case.B * pages, PAGE, case.Hkv, case.D, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    q = torch.randn(case.B * queries, case.Hq, case.D, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(case.B * pages, device="cuda").to(torch.int32).view(case.B, pages)
    lengths = torch.full((case.B,), case.N, dtype=torch.int32, device="cuda")
    starts = torch.arange(case.B + 1, dtype=torch.int32, device="cuda") * queries
    batch = PagedBatch(starts, lengths, table, max_seqlen_q=queries, max_context_len=case.N)
    scales: dict[str, Any] = {}
    if case.fp8:
        k_pages, v_pages = k_pages.to(torch.float8_e4m3fn), v_pages.to(torch.float8_e4m3fn)
        scales = {name: torch.ones(case.Hkv, device="cuda") for name in ("k_scale", "v_scale")}
    return lambda: paged_attention(q, k_pages, v_pages, batch, case.mask, backend=backend, **scales)


def _graphed(run: Run) -> Run:
    """As a CUDA graph, the way a server runs it: a decode is shorter than its launch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> Run:
        graph.replay()
        return run  # what the graph reads lives as long as this function: it holds addresses only

    return replay


def _sdpa(name: str, backend: SDPBackend) -> Peer:
    def prepare(case: Case) -> Run | None:
        if case.kind == "decode" or case.fp8 or not isinstance(case.mask, Causal | Full):
            return None
        q, k, v = inputs(case, repeat_kv=True)
        causal = isinstance(case.mask, Causal)

        def compute() -> torch.Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return _forward_or_backward(case, compute, (q, k, v))

    return Peer(name, prepare)


def _flex() -> Peer:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def prepare(case: Case) -> Run | None:
        if case.kind == "decode" or case.fp8 or not isinstance(case.mask, Causal | Full | Window):
            return None
        torch._dynamo.reset()  # past a few recompilations it would run uncompiled, and be timed so
        compiled = torch.compile(flex_attention, dynamic=False)
        q, k, v = inputs(case)
        block_mask = None
        if not isinstance(case.mask, Full):
            if isinstance(case.mask, Window) and case.mask.sinks:
                return None
            window = case.mask.size if isinstance(case.mask, Window) else None

            def visible(b: object, h: object, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
                return i >= j if window is None else (i >= j) & (i - j < window)

            block_mask = create_block_mask(visible, None, None, case.N, case.N, device="cuda", _compile=True)
        return _forward_or_backward(
            case, lambda: compiled(q, k, v, block_mask=block_mask, enable_gqa=case.Hq != case.Hkv), (q, k, v)
        )

    return Peer("flex", prepare)


def _fa3() -> Peer:
    if importlib.util.find_spec("flash_attn_interface"):
        from flash_attn_interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        version: dict[str, int] = {}
    else:
        from vllm.vllm_flash_attn.flash_attn_interface import (  # pyright: ignore[reportMissingImports]
            flash_attn_varlen_func,
        )

        version = {"fa_version": 3}

    def prepare(case: Case) -> Run | None:
        if not isinstance(case.mask, Causal | Full | Window) or (isinstance(case.mask, Window) and case.mask.sinks):
            return None
        if case.fp8:
            return None
        window = (case.mask.size - 1, 0) if isinstance(case.mask, Window) else (-1, -1)
        if case.kind == "decode":
            return _fa3_decode(case, flash_attn_varlen_func, version)
        if case.kind == "backward" and version:
            return None  # this build has the forward pass only
        q, k, v = (x.detach().flatten(0, 1) for x in inputs(case, token_major=True))
        starts = torch.arange(case.B + 1, dtype=torch.int32, device="cuda") * case.N
        return lambda: flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=case.N,
            max_seqlen_k=case.N,
            causal=not isinstance(case.mask, Full),
            window_size=list(window),
            **version,
        )

    return Peer("fa3", prepare)


def _fa3_decode(case: Case, func: Callable[..., object], version: dict[str, int]) -> Run:
    pages = case.N // PAGE
    k_pages, v_pages = (
        torch.randn(case.B * pages, PAGE, case.Hkv, case.D, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    q = torch.randn(case.B, case.Hq, case.D, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(case.B * pages, device="cuda").to(torch.int32).view(case.B, pages)
    lengths = torch.full((case.B,), case.N, dtype=torch.int32, device="cuda")
    starts = torch.arange(case.B + 1, dtype=torch.int32, device="cuda")
    return _graphed(
        lambda: func(
            q,
            k_pages,
            v_pages,
            cu_seqlens_q=starts,
            seqused_k=lengths,
            max_seqlen_q=1,
            max_seqlen_k=case.N,
            block_table=table,
            causal=True,
            **version,
        )
    )


PEERS: dict[str, Callable[[], Peer]] = {
    "cudnn": lambda: _sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
    "fa2": lambda: _sdpa("fa2", SDPBackend.FLASH_ATTENTION),
    "flex": _flex,
    "fa3": _fa3,
}


def make(name: str) -> Peer:
    """The peer of that name.

    Raises:
        ValueError: there is no such peer, or it is not installed here.
    """
    if name not in PEERS:
        raise ValueError(f"peers are {', '.join(PEERS)}; got {name!r}")
    try:
        return PEERS[name]()
    except ImportError as error:
        raise ValueError(f"peer {name!r} is not installed ({error})") from error
