"""Which kernel computes a product with a layer's weights, by their format and the number of rows.

With tensors, steps of few rows are computed by our own kernels on a GPU, and so are all where a token's results must
not depend on the number of tokens; all else is the matrix library's. With a format, `longreach_kernels.linear` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from longreach_kernels.linear import Fp8Blocks, linear
from torch import Tensor, nn

from longreach_patches.fused.activation import Activation
from longreach_patches.fused.dispatch import MAX_ROWS, uses_triton
from longreach_patches.fused.norm import Norm
from longreach_patches.fused.weights import Projection

Product = Callable[..., Tensor]  # as `products.product`


@dataclass(frozen=True)
class Products:
    """The products of a layer, for a backend's name as `longreach_kernels.resolve_backend` takes it."""

    backend: str
    batch_invariant: bool

    def __call__(self, x: Tensor, projection: Projection, gate: Activation | None = None) -> Tensor:
        """The projection of x (T, inputs): (T, outputs). With a `gate`, x is as in `add`."""
        if projection.others:
            parts = (projection._replace(others=()), *projection.others)
            return torch.cat([self(x, part) for part in parts], 1)
        weight, bias = projection.weight, projection.bias
        if isinstance(weight, Tensor):
            return (self._own(x) or nn.functional.linear)(x, weight, bias)
        return self._quantized(x, projection, **_gated_input(gate))

    def gated(self, x: Tensor, projection: Projection, activation: Activation) -> Tensor | None:
        """activation(gate) * up of a projection whose first half gives gates, (T, outputs / 2), by one kernel; None
        where there is none for so many rows."""
        weight, bias, others = projection.weight, projection.bias, projection.others
        if isinstance(weight, Tensor):
            own = self._own(x)
            return None if own is None or others else own(x, weight, bias, gated=True, activation=activation)
        if others:
            return None
        return self._quantized(x, projection, gated=True, activation=activation)

    def joins_norm(self, x: Tensor, norm: Norm | None, projection: Projection) -> bool:
        """Whether `normed` quantises the norm of rows x in the norm's kernel."""
        weight = projection.weight
        if norm is None or norm.centred or projection.others or isinstance(weight, Tensor):
            return False
        if self.batch_invariant or not uses_triton(x, self.backend):
            return False
        from longreach_kernels.linear.gpu import takes_fp8_rows

        return takes_fp8_rows(x, weight)

    def normed(
        self, x: Tensor, norm: Norm, projection: Projection, add: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """The projection of the norm of x (T, inputs), where `joins_norm`. With `add`, that times `scale` is added to x
        first, in place."""
        from longreach_kernels.linear.gpu import fp8_rows_linear

        from longreach_patches.fused.norm_rows_kernel import norm_rows

        weight = projection.weight
        made = norm_rows(x, norm, grouped=isinstance(weight, Fp8Blocks), add=add, scale=scale)
        return fp8_rows_linear(made, x.shape[0], weight, projection.bias, x.dtype)

    def gates_late(self, x: Tensor, down: Projection) -> bool:
        """Whether the activation of gates belongs to the next product: many rows may be quantised in its kernel."""
        return not (isinstance(down.weight, Tensor) or self.batch_invariant or x.shape[0] <= MAX_ROWS)

    def add(
        self, stream: Tensor, x: Tensor, projection: Projection, scale: float, gate: Activation | None = None
    ) -> None:
        """stream += scale * projection(x): the product's kernel adds, so the sum costs no pass of its own and is
        rounded once. With a `gate`, x has gates and what they gate; see `gates_late`."""
        weight, bias = projection.weight, projection.bias
        if not isinstance(weight, Tensor):
            self._quantized(x, projection, add_to=stream, scale=scale, **_gated_input(gate))
        elif (own := self._own(x)) is not None:
            own(x, weight, bias=bias, add_to=stream, scale=scale)
        else:
            stream.addmm_(x, weight.t(), alpha=scale)
            if bias is not None:
                stream.add_(bias, alpha=scale)

    def _quantized(self, x: Tensor, projection: Projection, **options: Any) -> Tensor:
        weight, bias = projection.weight, projection.bias
        return linear(x, weight, bias, backend=self.backend, batch_invariant=self.batch_invariant, **options)

    def _own(self, x: Tensor) -> Product | None:
        """Which of our products computes these rows with a tensor; None for the matrix library's."""
        if self.batch_invariant:
            from longreach_patches.fused.invariant import invariant_product

            return invariant_product
        if x.shape[0] > MAX_ROWS or not uses_triton(x, self.backend):
            return None
        from longreach_patches.fused.products import product

        return product


def _gated_input(gate: Activation | None) -> dict[str, Any]:
    return {} if gate is None else {"gated_input": True, "activation": gate}
