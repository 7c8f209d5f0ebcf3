"""Feature maps made of exponentials of the coordinates."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from linrope.feature_maps.logarithmic import LogFeatureMap, ScaledDtype


class Exp(LogFeatureMap):
    """φ(x) = exp(x); positive, width d.

    Args:
        head_dim: d, the width of queries and keys.
        scaled_dtype: See :class:`LogFeatureMap`.

    Raises:
        ValueError: An unknown ``scaled_dtype``.

    Source: Choromanski et al. 2021 (arXiv 2009.14794), figure 12, among the generalized kernels.
    """

    def __init__(self, head_dim: int, scaled_dtype: ScaledDtype = "float64") -> None:
        super().__init__(scaled_dtype)
        self.head_dim = self.num_features = head_dim

    def log_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """The query."""
        return query


class SoftmaxExp(LogFeatureMap):
    """φ_q(q) = softmax(q) over d and φ_k(k) = exp(k); positive, width d.

    Divided by the sum of its features it attends as :class:`Exp` does, for the two differ by one factor
    for each query; undivided (``normalizer=None``) it does not.

    Args:
        head_dim: d, the width of queries and keys.
        scaled_dtype: See :class:`LogFeatureMap`.

    Raises:
        ValueError: An unknown ``scaled_dtype``.

    Source: Shen et al. 2018 (arXiv 1812.01243); Su et al. 2021 (arXiv 2104.09864), section 2.3.
    """

    def __init__(self, head_dim: int, scaled_dtype: ScaledDtype = "float64") -> None:
        super().__init__(scaled_dtype)
        self.head_dim = self.num_features = head_dim

    def log_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """ln softmax(query)."""
        return query.log_softmax(-1)

    def log_key(self, key: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """The key."""
        return key
