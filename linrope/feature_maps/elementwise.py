"""Feature maps that act on each coordinate alone; width d."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from linrope.feature_maps.base import FeatureMap, check_floor, relative_floor
from linrope.precision import at_least_float32
from linrope.transforms import is_transformed


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
        query = at_least_float32(query)
        if is_transformed():
            return query.clamp(max=0).exp() + query.relu()
        if not torch.is_grad_enabled():  # without what it takes to call a function of one's own
            return _EluPlusOne.forward(query)
        return _EluPlusOne.apply(query)  # type: ignore[return-value]


class _EluPlusOne(torch.autograd.Function):
    """exp(min(x, 0)) + max(x, 0), with its derivative from the output: exp(x) below zero and 1 above is min(φ(x), 1).

    exp sees no positive x, and the derivative no branch: autograd would choose between the two, pass by pass.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(max=0).exp_().add_(x.relu())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        return grad * features.clamp(max=1)


class ReLU(FeatureMap):
    """φ(x) = relu(x) + floor·√(1 + ‖x‖²/d); positive where ``floor`` is, width d.

    The floor grows with x, so that what it adds to the kernel stays a small share of it.

    Args:
        head_dim: d, the width of queries and keys.
        floor: Least feature, relative to √(1 + ‖x‖²/d); 0 gives relu(x), whose normalizer can be 0.

    Raises:
        ValueError: ``floor`` is negative.

    Source: Choromanski et al. 2021 (arXiv 2009.14794), section 2.2, without projection; the floor is ours.
    """

    def __init__(self, head_dim: int, floor: float = 0.01) -> None:
        super().__init__()
        self.head_dim = self.num_features = head_dim
        self.floor, self.is_positive = check_floor(floor), floor > 0

    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """relu(query), and the floor."""
        x = at_least_float32(query)
        return relative_floor(x.relu(), x, self.floor)


class SquaredReLU(FeatureMap):
    """φ(x) = relu(x)² + floor·(1 + ‖x‖²/d); positive where ``floor`` is, width d.

    Args:
        head_dim: d, the width of queries and keys.
        floor: Least feature, relative to 1 + ‖x‖²/d; 0 gives relu(x)², whose normalizer can be 0.

    Raises:
        ValueError: ``floor`` is negative.

    Source: So et al. 2021 (arXiv 2109.08668) for the square; the floor is ours.
    """

    def __init__(self, head_dim: int, floor: float = 0.01) -> None:
        super().__init__()
        self.head_dim = self.num_features = head_dim
        self.floor, self.is_positive = check_floor(floor), floor > 0

    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """relu(query)², and the floor."""
        x = at_least_float32(query)
        return relative_floor(x.relu().square(), x, self.floor, degree=2)


class Softplus(FeatureMap):
    """φ(x) = ln(1 + exp(x)); positive, width d.

    Args:
        head_dim: d, the width of queries and keys.

    Source: Dugas et al. 2000, Incorporating Second-Order Functional Knowledge, section 3, for the function.
    """

    is_positive = True

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = self.num_features = head_dim

    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """ln(1 + exp(query))."""
        return softplus(at_least_float32(query))


class Sigmoid(FeatureMap):
    """φ(x) = 1 / (1 + exp(-x)); positive, width d.

    Args:
        head_dim: d, the width of queries and keys.

    Source: Choromanski et al. 2021 (arXiv 2009.14794), figure 12, among the generalized kernels.
    """

    is_positive = True

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = self.num_features = head_dim

    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """1 / (1 + exp(-query))."""
        return at_least_float32(query).sigmoid()
