"""The shapes that the attention kernels are measured on, and what each of them must compute and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from longreach_kernels import BlockSparse, Causal, Full, Mask, Window

Kind = Literal["forward", "backward", "decode"]

_CAUSAL = Causal()
_MATMULS = {"forward": 2, "backward": 5}  # products of two N x N x D matrices; the backward pass computes QK^T again


@dataclass(frozen=True)
class Case:
    """One measurement: B sequences of N keys, Hq query and Hkv key heads of D channels, under a mask.

    `forward` and `backward` have N queries a sequence; `decode` has one, over keys in pages. With `fp8` keys lie in
    pages of 8-bit floats, those of a forward pass too.
    """

    kind: Kind
    B: int
    N: int
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    mask: Mask = _CAUSAL
    fp8: bool = False

    @property
    def name(self) -> str:
        """A short name, unique among the cases of a run."""
        length = f"{self.N // 1024}K" if self.N % 1024 == 0 else str(self.N)
        heads = f"{self.Hq}/{self.Hkv}"
        mask = "" if self.kind == "decode" and isinstance(self.mask, Causal) else f" {_describe(self.mask)}"
        return f"{self.kind} D{self.D} H{heads} B{self.B} N{length}{mask}{' fp8' if self.fp8 else ''}"

    @property
    def pairs(self) -> int:
        """(query, key) pairs that the mask allows, in all sequences, for one head."""
        n = self.N
        if self.kind == "decode":
            return self.B * (min(n, self.mask.size) if isinstance(self.mask, Window) else n)
        if isinstance(self.mask, Full):
            return self.B * n * n
        if isinstance(self.mask, BlockSparse):
            return self.B * int(self.mask.layout.sum()) * self.mask.block**2
        if isinstance(self.mask, Window):
            w = min(self.mask.size, n)
            sinks = min(self.mask.sinks, n - w)
            # Rows before the window is full see 1, 2, ... w keys; a sink is seen beside the window from then on.
            return self.B * (w * (w + 1) // 2 + (n - w) * w + sinks * (n - w) - sinks * (sinks - 1) // 2)
        return self.B * n * (n + 1) // 2

    @property
    def flops(self) -> int:
        """Floating point operations of the matrix products over the allowed pairs."""
        products = _MATMULS["forward" if self.kind == "decode" else self.kind]
        return 2 * products * self.pairs * self.Hq * self.D

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, each read once."""
        keys = self.pairs if self.kind == "decode" else self.B * self.N
        return 2 * (1 if self.fp8 else 2) * keys * self.Hkv * self.D


def _describe(mask: Mask) -> str:
    if isinstance(mask, Window):
        return f"window {mask.size}" + (f"+{mask.sinks}" if mask.sinks else "")
    if isinstance(mask, BlockSparse):
        return f"blocks of {mask.block}, density {mask.layout.float().mean():.2f}"
    return type(mask).__name__.lower()


def random_blocks(length: int, density: float, block: int = 128) -> BlockSparse:
    """A block layout in which each block is kept with probability `density`; the same one every time."""
    blocks = length // block
    generator = torch.Generator().manual_seed(round(density * 1000))
    return BlockSparse(torch.rand(blocks, blocks, generator=generator) < density, block)


def parse_mask(text: str) -> Mask:
    """`causal`, `full`, `window:4096` or `window:4096:4` (with sinks).

    Raises:
        ValueError: it is none of these.
    """
    name, *numbers = text.split(":")
    if name in ("causal", "full") and not numbers:
        return Causal() if name == "causal" else Full()
    if name == "window" and 1 <= len(numbers) <= 2 and all(number.isdigit() for number in numbers):
        return Window(*map(int, numbers))
    raise ValueError(f"mask must be causal, full, window:SIZE or window:SIZE:SINKS, got {text!r}")


K = 1024

SUITES: dict[str, Callable[[], tuple[Case, ...]]] = {
    "forward": lambda: (
        *(Case("forward", 1, n * K) for n in (4, 16, 64, 128)),
        Case("forward", 1, 16 * K, mask=Full()),
        *(Case("forward", 1, 16 * K, D=64, mask=mask) for mask in (Causal(), Full())),
        *(Case("forward", 1, n * K, fp8=True) for n in (4, 16, 64, 128)),
        Case("forward", 1, 16 * K, D=64, fp8=True),
        *(Case("forward", 1, 16 * K, Hq=16, Hkv=8, D=256, mask=mask) for mask in (Causal(), Full())),
        *(Case("forward", 1, n * K, mask=Window(4096)) for n in (16, 64, 128)),
    ),
    "sparse": lambda: (
        Case("forward", 1, 64 * K, mask=Full()),
        *(Case("forward", 1, 64 * K, mask=random_blocks(64 * K, s)) for s in (0.05, 0.1, 0.2, 0.35, 0.5)),
    ),
    "decode": lambda: tuple(
        Case("decode", b, n * K, fp8=fp8) for fp8 in (False, True) for b, n in ((1, 16), (1, 128), (8, 32), (64, 16))
    ),
    "backward": lambda: (
        Case("backward", 1, 16 * K, Hq=16, Hkv=16),
        Case("backward", 1, 16 * K, Hq=32, Hkv=32, D=64),
        Case("backward", 1, 16 * K),
    ),
}


def select(suites: str, mask: str | None = None, lengths: str | None = None) -> list[Case]:
    """The cases of the named suites (with commas); with `mask` or `lengths`, forward cases of those at D=128 instead.

    Raises:
        ValueError: a suite, a mask or a length that does not exist.
    """
    cases: list[Case] = []
    for name in suites.split(","):
        if name not in SUITES:
            raise ValueError(f"suites are {', '.join(SUITES)}; got {name!r}")
        if name == "forward" and (mask or lengths):
            numbers = (lengths or "16384").split(",")
            if not all(number.isdigit() and int(number) > 0 for number in numbers):
                raise ValueError(f"lengths must be positive numbers with commas, got {lengths!r}")
            cases += [Case("forward", 1, int(number), mask=parse_mask(mask or "causal")) for number in numbers]
        else:
            cases += SUITES[name]()
    return cases
