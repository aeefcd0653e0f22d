"""Attention whose softmax is replaced by a product of features: linear in the length, and causal by running sums.

Short references in PyTorch, in float32. They compute what the papers' equations say, in chunks, so that the time and
memory are linear; they are not the fastest form that a GPU could run.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

CHUNK = 128
_FLOOR = 1e-6  # added to features, so that no row's weights are all 0


def linear_attention(q_features: Tensor, k_features: Tensor, v: Tensor) -> Tensor:
    """Causal linearized attention (Katharopoulos et al. 2020, equation 9):

        O_i = φ(Q_i)ᵀ Σ_{j<=i} φ(K_j) V_jᵀ / φ(Q_i)ᵀ Σ_{j<=i} φ(K_j)

    Sums over whole chunks of keys run from chunk to chunk; inside a chunk the products are masked.

    Args:
        q_features, k_features: (B, H, N, M) float32, not negative.
        v: (B, H, N, D).

    Returns:
        (B, H, N, D) in the dtype of v.
    """
    length, dtype = v.shape[2], v.dtype
    padding = (0, 0, 0, -length % CHUNK)
    qf, kf, values = (
        torch.nn.functional.pad(x.float(), padding).unflatten(2, (-1, CHUNK)) for x in (q_features, k_features, v)
    )  # (B, H, C, CHUNK, M or D)
    values = torch.cat([values, torch.ones_like(values[..., :1])], -1)  # the last column sums the weights
    states = kf.mT @ values  # (B, H, C, M, D + 1)
    before = states.cumsum(2) - states
    inside = (qf @ kf.mT).tril()
    out = (inside @ values + qf @ before).flatten(2, 3)[:, :, :length]
    return (out[..., :-1] / out[..., -1:]).to(dtype)


def elu_features(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1 (Katharopoulos et al. 2020, equation 7), float32."""
    return torch.nn.functional.elu(x.float()) + 1


@lru_cache(maxsize=8)
def projection(features: int, channels: int, device: torch.device, seed: int = 0) -> Tensor:
    """Performer's random directions (Choromanski et al. 2021, section 2.4): Gaussian vectors, orthogonal to each other
    in blocks of ``channels``, each as long as a Gaussian vector is. (features, channels) float32."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for start in range(0, features, channels):
        orthogonal, triangular = torch.linalg.qr(torch.randn(channels, channels, generator=generator))
        # LAPACK fixes signs by its own rule, which would favour some directions; with these signs all are as likely.
        blocks.append((orthogonal * triangular.diagonal().sign())[: features - start])
    lengths = torch.randn(features, channels, generator=generator).norm(dim=1, keepdim=True)
    return (torch.cat(blocks) * lengths).to(device)


def positive_features(x: Tensor, directions: Tensor, *, is_query: bool) -> Tensor:
    """FAVOR+ features (Choromanski et al. 2021, lemma 1): φ(x) = exp(Wx - |x|²/2) / sqrt(M), of x scaled by
    D^(-1/4), so that E[φ(q)·φ(k)] = exp(q·k / sqrt(D)).

    Exponents are lowered by their maximum, of each query, or of all keys of a head: the factor is in the numerator and
    in the denominator, and cancels.

    Args:
        x: (B, H, N, D).
        directions: (M, D) float32.

    Returns:
        (B, H, N, M) float32.
    """
    x = x.float() * x.shape[-1] ** -0.25
    exponents = x @ directions.T - x.square().sum(-1, keepdim=True) / 2
    most = exponents.amax(-1 if is_query else (-2, -1), keepdim=True)
    return (torch.exp(exponents - most.detach()) + _FLOOR) / math.sqrt(len(directions))


def linear_transformer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The linear transformer's causal attention; q, k, v (B, H, N, D), out like v."""
    return linear_attention(elu_features(q), elu_features(k), v)


def performer(q: Tensor, k: Tensor, v: Tensor, features: int = 256) -> Tensor:
    """Performer's causal attention with ``features`` random features; q, k, v (B, H, N, D), out like v."""
    directions = projection(features, q.shape[-1], q.device)
    q_features = positive_features(q, directions, is_query=True)
    return linear_attention(q_features, positive_features(k, directions, is_query=False), v)
