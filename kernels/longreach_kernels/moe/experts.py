"""The weights of a layer's experts, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from longreach_kernels.linear import Weight

ExpertsActivation = Literal["silu", "gelu_tanh", "swiglu_clamped"]
_KNOWN = ("silu", "gelu_tanh", "swiglu_clamped")


@dataclass(frozen=True)
class Experts:
    """E experts, each down(activation(gate_up(x))), with C channels outside and I inside.

    Attributes:
        gate_up: (E, 2 I, C), of any format: of each expert the gates' outputs, then those that they gate.
        down: (E, C, I), of any format.
        gate_up_bias: (E, 2 I), in the order of `gate_up`, or None.
        down_bias: (E, C), or None. Of ranks that share an expert's channels, one has it.
        activation: "silu" and "gelu_tanh" give activation(gate) * up; "swiglu_clamped" is gpt-oss's (up + 1) * gate *
            sigmoid(alpha * gate), with gates at most `limit` and ups between -limit and limit. A function takes
            (rows, outputs of gate_up) and gives (rows, I): experts without gates have such a one.
        alpha: of "swiglu_clamped".
        limit: of "swiglu_clamped".
        interleaved: whether gates and what they gate alternate in `gate_up`, gate first (gpt-oss).
        first: the number of the first of these experts; a token's experts that are not among the E are skipped, for
            another rank has them.
    """

    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: ExpertsActivation | Callable[[Tensor], Tensor] = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    interleaved: bool = False
    first: int = 0

    def __post_init__(self) -> None:
        if not callable(self.activation) and self.activation not in _KNOWN:
            raise ValueError(f"activation: {self.activation!r} is no function and not one of {', '.join(_KNOWN)}")
        if len(self.gate_up.shape) != 3 or len(self.down.shape) != 3:
            raise ValueError(
                f"gate_up, down: expected (E, 2 I, C) and (E, C, I), got {tuple(self.gate_up.shape)} and "
                f"{tuple(self.down.shape)}"
            )
        count, width, channels = self.gate_up.shape
        if self.down.shape[:2] != (count, channels) or (self.is_gated and width != 2 * self.down.shape[2]):
            raise ValueError(
                f"down: expected ({count}, {channels}, {width // 2}) beside gate_up {tuple(self.gate_up.shape)}, got "
                f"{tuple(self.down.shape)}"
            )
        for name, bias, weight in (
            ("gate_up_bias", self.gate_up_bias, self.gate_up),
            ("down_bias", self.down_bias, self.down),
        ):
            if bias is not None and tuple(bias.shape) != tuple(weight.shape[:2]):
                raise ValueError(f"{name}: expected {tuple(weight.shape[:2])}, got {tuple(bias.shape)}")

    @property
    def is_gated(self) -> bool:
        """Whether the kernels know the activation, which then halves the channels."""
        return not callable(self.activation)

    @property
    def count(self) -> int:
        """E, of this rank."""
        return self.gate_up.shape[0]

    @property
    def channels(self) -> int:
        """C."""
        return self.down.shape[1]

    @property
    def inner(self) -> int:
        """I, of this rank."""
        return self.down.shape[2]
