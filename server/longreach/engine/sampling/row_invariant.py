"""Functions of rows of logits whose result for a row has the same bits whichever rows are beside it."""

from __future__ import annotations

import torch

# A GPU reads rows of float32 in vectors of so many. Where rows are no multiple of it, those that begin between two
# vectors would be summed in another order than the others.
_VECTOR = 4


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Of each row of logits (R, V) float32."""
    return _aligned(logits).softmax(-1)[:, : logits.shape[1]]


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Of each row of logits (R, V) float32."""
    return _aligned(logits).log_softmax(-1)[:, : logits.shape[1]]


def likeliest(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """The columns (R, count) int64 of each row's largest numbers, of logprobs (R, V) float32, the largest first.

    Of equal numbers the first comes first. `torch.topk` takes any of them, and which depends on the number of rows.
    """
    bits = logprobs.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)  # ordered as the numbers are
    last = logprobs.shape[1] - 1
    keys = (ordered << 32) + torch.arange(last, -1, -1, device=logprobs.device)
    return last - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


def _aligned(logits: torch.Tensor) -> torch.Tensor:
    missing = -logits.shape[1] % _VECTOR
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
