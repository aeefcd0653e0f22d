"""The gate of attention's result, of some families: a number for each channel or each head, from the layer's input."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_patches.families import OutputGate


def gate_heads(out: Tensor, logits: Tensor, gate: OutputGate | None) -> Tensor:
    """Multiply attention's result (n, H, D) in place by the gate of its projection's (n, H), (n, H D) or (n, H, D);
    returns it. Without a `gate` that is the sigmoid."""
    # Torch computes either in fp32 and rounds once.
    factor = logits.sigmoid_() if gate is None or gate.activation == "sigmoid" else torch.nn.functional.softplus(logits)
    return out.mul_(factor.view(*out.shape[:2], -1))
