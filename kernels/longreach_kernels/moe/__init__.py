"""Mixture-of-experts layers: the choice of experts, and the products of each token with its experts' weights.

No call waits for the host, so that steps with experts replay as CUDA graphs. `route` chooses, `experts_product`
computes, and `Experts` holds the weights.
"""

from longreach_kernels.moe.api import experts_product
from longreach_kernels.moe.experts import Experts, ExpertsActivation
from longreach_kernels.moe.route import route
from longreach_kernels.moe.routing import Routing

__all__ = ["Experts", "ExpertsActivation", "Routing", "experts_product", "route"]
