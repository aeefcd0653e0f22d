"""The activations of experts on the device."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """activation(gate) * up in fp32, as `Experts` names it; 1 + tanh(y) is 2 sigmoid(2 y)."""
    if ACTIVATION == "swiglu_clamped":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        at = ALPHA * gate
    elif ACTIVATION == "gelu_tanh":
        at = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    else:
        at = gate
    return gate / (1.0 + tl.exp(-at)) * up
