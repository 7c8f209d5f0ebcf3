"""Feature maps that act on each coordinate alone."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from linrope.feature_maps.base import FeatureMap


class EluPlusOne(FeatureMap):
    """φ(x) = elu(x) + 1: x + 1 above zero, exp(x) below; positive, width d.

    The sum is never formed below zero: in float32 ``elu(x) + 1`` rounds to 0 at -17.5, ``exp(x)``
    stays positive to -103.

    Args:
        head_dim: d, the width of queries and keys.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), eq. 7.
    """

    is_positive = True

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = self.num_features = head_dim

    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """elu(query) + 1."""
        return self._map(query)

    def map_key(self, key: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """elu(key) + 1."""
        return self._map(key)

    def _map(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        # exp sees no positive x: the branch not taken would send inf * 0 = NaN into the gradient.
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
