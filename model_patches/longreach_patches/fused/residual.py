"""What sublayers add to the residual stream: a product or a sum of experts, of all ranks, and normalised where a family
does that behind a sublayer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, distributed

from longreach_patches.fused.activation import Activation
from longreach_patches.fused.norm import Norm, normalize
from longreach_patches.fused.project import Products
from longreach_patches.fused.weights import LayerWeights, Projection


@dataclass(frozen=True)
class Residual:
    """How a layer adds to its stream (n, C), in place.

    Attributes:
        products: the layer's.
        multiplier: of all that is added.
    """

    products: Products
    multiplier: float

    def begin(self, stream: Tensor, weights: LayerWeights, norm: Norm | None) -> Tensor | None:
        """What products are added to: the stream, which several ranks have and whose sum must have it once; None where
        their sum is normalised first."""
        if norm is not None:
            return None
        return stream if weights.sum_over is None or weights.adds_stream else stream.zero_()

    def add_product(
        self,
        stream: Tensor,
        x: Tensor,
        weights: LayerWeights,
        projection: Projection,
        norm: Norm | None,
        gate: Activation | None = None,
    ) -> None:
        """stream += norm(projection(x)), summed over the ranks that each have a part of the projection's inputs. With a
        `gate`, x is as in `Products.add`."""
        total = self.begin(stream, weights, norm)
        if total is None:
            total = self.products(x, projection, gate)
        else:
            self.products.add(total, x, projection, self.multiplier, gate)
        self.finish(stream, total, weights, norm)

    def finish(self, stream: Tensor, total: Tensor, weights: LayerWeights, norm: Norm | None) -> None:
        """Make a sum that `begin` began that of all ranks, and add it to the stream if it is not that."""
        if weights.sum_over is not None:
            distributed.all_reduce(total, group=weights.sum_over)
        if total is stream:
            return
        if norm is None:
            stream.add_(total, alpha=self.multiplier)
        else:
            normalize(total, norm, self.products.backend, add_to=stream, scale=self.multiplier)
