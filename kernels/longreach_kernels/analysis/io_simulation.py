"""FlashAttention-1's own loop order in PyTorch, forward and backward, counting what passes between HBM and the chip.

Readable, not fast: every ``hbm.read`` is a load statement of algorithms 1 and 4 (Dao et al. 2022), every ``hbm.write``
a store. `longreach_kernels.analysis.io_model` predicts the counts to the byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.analysis.io_model import Tiles, Traffic


class Hbm:
    """Tensors in slow memory, with a count of the bytes that go in and out."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = dict(tensors)
        self._read = self._written = 0

    def read(self, name: str, rows: slice) -> Tensor:
        """Load rows of a tensor."""
        x = self.tensors[name][rows].clone()
        self._read += x.numel() * x.element_size()
        return x

    def write(self, name: str, rows: slice, x: Tensor) -> None:
        """Store rows of a tensor."""
        self.tensors[name][rows] = x
        self._written += x.numel() * x.element_size()

    def allocate(self, name: str, like: Tensor, value: float = 0.0) -> None:
        """Make a tensor and fill it, which writes all of it."""
        self.tensors[name] = torch.full_like(like, value)
        self._written += like.numel() * like.element_size()

    @property
    def traffic(self) -> Traffic:
        """Bytes so far."""
        return Traffic(self._read, self._written)


def _slices(n: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, n)) for start in range(0, n, tile)]


def flash1_forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, *, scale: float, layout: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Traffic]:
    """Algorithm 1, and with ``layout`` its block-sparse form (algorithm 5).

    Args:
        q, k, v: (N, d), one dtype.
        tiles: B_r and B_c.
        scale: factor of the logits.
        layout: bool (Q tiles, K/V tiles), pairs to compute; all by default.

    Returns:
        out (N, d), l (N,), m (N,), and the traffic.
    """
    hbm = Hbm(q=q, k=k, v=v)
    hbm.allocate("o", q)
    hbm.allocate("l", q[:, 0])
    hbm.allocate("m", q[:, 0], float("-inf"))
    for j, columns in enumerate(_slices(len(k), tiles.columns)):
        k_j, v_j = hbm.read("k", columns), hbm.read("v", columns)
        for i, rows in enumerate(_slices(len(q), tiles.rows)):
            if layout is not None and not layout[i, j]:
                continue
            q_i, o_i = hbm.read("q", rows), hbm.read("o", rows)
            l_i, m_i = hbm.read("l", rows), hbm.read("m", rows)
            s = q_i @ k_j.T * scale
            m_tile = s.amax(1)
            p = torch.exp(s - m_tile[:, None])
            l_tile = p.sum(1)
            m_new = torch.maximum(m_i, m_tile)
            old, new = torch.exp(m_i - m_new), torch.exp(m_tile - m_new)
            l_new = old * l_i + new * l_tile
            o_i = ((l_i * old)[:, None] * o_i + new[:, None] * (p @ v_j)) / l_new[:, None]
            hbm.write("o", rows, o_i)
            hbm.write("l", rows, l_new)
            hbm.write("m", rows, m_new)
    return hbm.tensors["o"], hbm.tensors["l"], hbm.tensors["m"], hbm.traffic


def flash1_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    row_sum: Tensor,
    row_max: Tensor,
    tiles: Tiles,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Traffic]:
    """Algorithm 4: dq, dk, dv (N, d), and the traffic; arguments as `flash1_forward` gives them."""
    hbm = Hbm(q=q, k=k, v=v, o=out, grad=grad, l=row_sum, m=row_max)
    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        hbm.allocate(name, like)
    for columns in _slices(len(k), tiles.columns):
        k_j, v_j = hbm.read("k", columns), hbm.read("v", columns)
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)
        for rows in _slices(len(q), tiles.rows):
            q_i, o_i, grad_i, dq_i = (hbm.read(name, rows) for name in ("q", "o", "grad", "dq"))
            l_i, m_i = hbm.read("l", rows), hbm.read("m", rows)
            p = torch.exp(q_i @ k_j.T * scale - m_i[:, None]) / l_i[:, None]
            dv_j += p.T @ grad_i
            ds = p * (grad_i @ v_j.T - (grad_i * o_i).sum(1, keepdim=True))
            hbm.write("dq", rows, dq_i + scale * ds @ k_j)
            dk_j += scale * ds.T @ q_i
        hbm.write("dk", columns, dk_j)
        hbm.write("dv", columns, dv_j)
    return hbm.tensors["dq"], hbm.tensors["dk"], hbm.tensors["dv"], hbm.traffic
