"""Compile the portable kernels for GPUs that are not there, and print the shared memory of each as JSON.

The launches are the real ones: tensors on the CPU pass for tensors on the GPU, so that tiles, warps and stages are what
the kernels' own tables pick for it. Nothing runs. Run as a process of its own, because Triton's interpreter, chosen for
the other tests, has no compiler. Arguments: a compute capability as one number, a head dim and a launch of `LAUNCHES`,
such as `80:128:dense causal`.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from longreach_kernels import (
    BlockSparse,
    Causal,
    Mask,
    Window,
    attention,
    paged_attention,
    ragged_attention,
    write_pages,
)
from longreach_kernels.backends import resolve as backends
from longreach_kernels.sizes import MAX_GRADIENT_HEAD_DIM
from longreach_kernels.sparse import Antidiagonal, Moments, Pooled, Recall, select_tiles
from longreach_kernels.sparse.decode.attend import block_attention, select_blocks
from longreach_kernels.sparse.decode.bounds import new_bounds, write_bounds
from longreach_patches.families import Rotary
from longreach_patches.fused import invariant, invariant_tiles, products
from longreach_patches.fused.activation import gated_activation
from longreach_patches.fused.norm import HeadNorms, Norm, normalize, normalize_all_heads
from longreach_patches.fused.rotary import QueryGrowth, rotate_and_write
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_for

from tests.kernels.accuracy import FP8, paged, qkv
from tests.pairwise import covering

_HALF = torch.bfloat16
_BLOCKS = {size: BlockSparse(torch.ones(300 // size + 1, 300 // size + 1).bool(), size) for size in (64, 128)}


class _Driver:
    """A driver of the GPU that is pretended at the time; each has a device number, since Triton remembers by device."""

    arch = 80

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


class _Compiler:
    """Compiles, and keeps the shared memory of what it compiled."""

    def __init__(self) -> None:
        self.launch = ""
        self.shared: dict[str, dict[str, int]] = {}

    def __call__(self, src: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> Any:
        try:
            kernel = compile_for(src, target=target, options=options)
        except Exception as error:
            raise RuntimeError(f"{self.launch}: {src.name} with {options}") from error
        found = self.shared.setdefault(self.launch, {})
        found[src.name] = max(found.get(src.name, 0), kernel.metadata.shared)
        return SimpleNamespace(run=_nothing, launch_metadata=_nothing, function=None, packed_metadata=None)


def _nothing(*_: Any) -> None:
    pass


def pretend() -> _Compiler:
    """Let tensors on the CPU pass for tensors on the driver's GPU."""
    compiler = _Compiler()
    triton.runtime.driver.set_active(_Driver())  # pyright: ignore[reportArgumentType]
    triton.compiler.compile = compiler  # pyright: ignore[reportAttributeAccessIssue]
    for name in (
        "sparse.select.antidiagonal",
        "sparse.select.pooled_launch",
        "backends.triton.backend",
    ):  # what the first call would import
        importlib.import_module(f"longreach_kernels.{name}")
    backends._resolve_triton = lambda *_: backends.Backend("triton", "pretended")
    stand_ins = {"capability": lambda _: _Driver.arch, "processors": lambda _: 132, "_processors": lambda _: 132}
    for module in [module for name, module in sys.modules.items() if name.startswith("longreach")]:
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)
    return compiler


def dense(head_dim: int, dtype: torch.dtype, mask: Mask, *, backward: bool = False, **options: Any) -> None:
    """Attention and, if wanted and there are any, its gradients."""
    backward &= head_dim <= MAX_GRADIENT_HEAD_DIM
    tensors = [x.requires_grad_(backward) for x in qkv(1, 4, 2, 300, 300, head_dim, dtype)]
    out = attention(*tensors, mask, backend="triton", **options)
    if backward:
        out.sum().backward()


def ragged(head_dim: int, dtype: torch.dtype, mask: Mask, **options: Any) -> None:
    """Attention to sequences one after another."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv(1, 4, 2, 300, 300, head_dim, dtype))
    starts = torch.tensor([0, 100, 300], dtype=torch.int32)
    ragged_attention(q, k, v, starts, starts, mask, backend="triton", **options)


def pages(head_dim: int, dtype: torch.dtype, mask: Mask, size: int, *, fp8: bool = False, **options: Any) -> None:
    """A decode and a chunk, and the write of what they read."""
    q, k_pages, v_pages, batch = paged([1, 200], [300, 300], size, 4, 2, head_dim, dtype, num_decodes=1)
    k, v = torch.randn(2, 3, 2, head_dim).to(dtype)
    if fp8:
        k_pages, v_pages = k_pages.to(FP8), v_pages.to(FP8)
        options |= {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}
    scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
    write_pages(k, v, k_pages, v_pages, torch.tensor([1, 2, 3]), backend="triton", **scales)
    paged_attention(q, k_pages, v_pages, batch, mask, backend="triton", **options)


def estimates(head_dim: int, dtype: torch.dtype, estimator: Any, window: int | None, softcap: float | None) -> None:
    """Lists of tiles by an estimate, and attention to what they name."""
    q, k_pages, v_pages, batch = paged([2000], [2000], 128, 4, 2, head_dim, dtype)
    options = {"target": Recall(0.9), "estimator": estimator, "window": window, "softcap": softcap}
    options |= {"dense_below": 128, "tail": 128, "local": 128}
    lists = select_tiles(q, k_pages, batch, backend="triton", **options)
    paged_attention(q, k_pages, v_pages, batch, lists=lists, backend="triton", softcap=softcap)


def budgets(head_dim: int, dtype: torch.dtype) -> None:
    """Decodes that read some blocks of their pages."""
    q, k_pages, v_pages, batch = paged([1, 1], [300, 200], 128, 4, 2, head_dim, dtype, num_decodes=2)
    bounds = new_bounds(k_pages)
    write_bounds(k_pages, bounds, torch.tensor([1, 2, 3]), backend="triton")
    # What is chosen is not computed here, and must name pages that there are.
    choice = select_blocks(q, bounds, batch, budget=64, backend="triton")
    for chosen in (choice.blocks, choice.rows, choice.lengths):
        chosen.zero_()
    block_attention(q, k_pages, v_pages, batch, choice, backend="triton")


def layers(head_dim: int, dtype: torch.dtype) -> None:
    """What the patches of a model launch beside attention."""
    x = torch.randn(16, 2048).to(dtype)
    weight = torch.ones(2048).to(dtype)
    for kind, added, bias in covering(("rms", "rms_plus_one", "layer"), (False, True), (None, weight)):
        around: dict[str, Any] = {"add_to": x.clone(), "scale": 0.5} if added else {}
        normalize(x, Norm(weight, 1e-6, kind, bias), backend="triton", **around)
    for activation in ("silu", "gelu_tanh"):
        gated_activation(x, activation, backend="triton")
    qkv_rows = torch.randn(3, 8 * head_dim).to(dtype)
    k_pages, v_pages = torch.zeros(2, 4, 128, 2, head_dim).to(dtype)
    slots = torch.tensor([1, 2, 3])
    growth = QueryGrowth(slots, 0.1, 8192)
    head_norms = HeadNorms(weight[:head_dim], weight[:head_dim], 1e-6, "rms_plus_one")
    rotaries = (Rotary(), Rotary(pairs=True), Rotary(pairs=True, doubled=True))
    norms: tuple[dict[str, Any], ...] = (
        {},
        {"norms": head_norms},
        {"norms": head_norms, "norms_last": True, "growth": growth},
    )
    for rotary, channels, normed in covering(rotaries, (head_dim, head_dim // 2), norms):
        rope = torch.randn(2, 3, channels).to(dtype).unbind(0)
        rotate_and_write(qkv_rows, rope, k_pages, v_pages, slots, heads=4, rotary=rotary, **normed, backend="triton")
    for kind in ("rms", "rms_plus_one"):
        all_heads = HeadNorms(weight[: 4 * head_dim], weight[: 2 * head_dim], 1e-6, kind)
        normalize_all_heads(qkv_rows, all_heads, backend="triton")
    for outputs in (2048, 64 * 1200):  # few and many programs have tiles of their own
        weight, rows = torch.empty(outputs, 64).to(dtype), torch.empty(16, 64).to(dtype)
        products.product(rows, weight)
        products.product(rows, weight, add_to=torch.empty(16, outputs).to(dtype), scale=0.5)
        for activation in ("silu", "gelu_tanh"):
            products.product(rows, weight, gated=True, activation=activation)


def invariant_products(arch: int, dtype: torch.dtype) -> None:
    """Products whose bits do not depend on the batch, in every tile that there is for a GPU."""
    x, weight = torch.empty(300, 256).to(dtype), torch.empty(1024, 256).to(dtype)
    for gated in (False, True):
        outputs = 512 if gated else 1024
        for tile in invariant_tiles.candidates(dtype, arch, gated):
            out = x.new_empty(300, outputs)
            invariant._launch(tile, x, weight, None, out, outputs, gated, not gated, 132)


SINKS = torch.zeros(4)
LAUNCHES: dict[str, Callable[[int], None]] = {
    "dense causal": lambda d: dense(d, _HALF, Causal(), backward=True),
    "dense fp32": lambda d: dense(d, torch.float32, Causal(), backward=True),
    "dense blocks of 128": lambda d: dense(d, _HALF, _BLOCKS[128], backward=True),
    "dense blocks of 64": lambda d: dense(d, torch.float16, _BLOCKS[64] & Causal(), backward=True),
    "pages of 128": lambda d: pages(d, _HALF, Causal(), 128),
    "pages of 16, window": lambda d: pages(d, torch.float16, Window(100, 4), 16, softcap=9.0, sink_logits=SINKS),
    "pages of 128, fp32": lambda d: pages(d, torch.float32, Causal(), 128),
    "pages in fp8": lambda d: pages(d, _HALF, Causal(), 128, fp8=True),
    "folded 8": lambda d: estimates(d, _HALF, Antidiagonal(8), None, 9.0),
    "folded 16": lambda d: estimates(d, _HALF, Antidiagonal(16), 100, None),
    "pooled": lambda d: estimates(d, _HALF, Pooled(), 100, None),
    "moments": lambda d: estimates(d, _HALF, Moments(), None, None),
    "budgets": lambda d: budgets(d, _HALF),
    "layers": lambda d: layers(d, _HALF),
    "ragged": lambda d: ragged(d, _HALF, Window(100, 4), softcap=9.0),
    "dense softcap and sinks": lambda d: dense(
        d, torch.float16, Window(100, 4), backward=True, softcap=9.0, sink_logits=SINKS
    ),
    "pages of 64, blocks": lambda d: pages(d, _HALF, _BLOCKS[64], 64),
    "moments fp32": lambda d: estimates(d, torch.float32, Moments(), 100, 9.0),
    "folded 16 fp32": lambda d: estimates(d, torch.float32, Antidiagonal(16), None, None),
    "layers fp32": lambda d: layers(d, torch.float32),
    "invariant products": lambda _: invariant_products(_Driver.arch, _HALF),
    "invariant products fp32": lambda _: invariant_products(_Driver.arch, torch.float32),
}


def main(arguments: list[str]) -> dict[str, dict[str, int]]:
    """Bytes of shared memory, by argument and kernel."""
    compiler = pretend()
    for compiler.launch in arguments:
        arch, head_dim, name = compiler.launch.split(":")
        _Driver.arch = int(arch)
        LAUNCHES[name](int(head_dim))
    return compiler.shared


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
