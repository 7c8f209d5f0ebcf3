"""Feature maps with parameters, of their own for each head once :meth:`for_heads` has said how many there are."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from linrope.feature_maps.base import FeatureMap, check_floor, relative_floor
from linrope.feature_maps.expansions import packed_square
from linrope.feature_maps.logarithmic import LogFeatureMap, ScaledDtype
from linrope.feature_maps.projection import check_num_features, orthogonal_rows, wide_product
from linrope.precision import at_least_float32


class T2R(FeatureMap):
    """φ(x) = relu(Wx + b) + floor·√(1 + ‖x‖²/d); width m, positive where ``floor`` is.

    W and b are those of a fresh ``torch.nn.Linear``.

    Args:
        head_dim: d, the width of queries and keys.
        num_features: m; d by default.
        floor: Least feature, relative to √(1 + ‖x‖²/d); 0, the paper's, gives a normalizer that can be 0.
        num_heads: Heads with parameters of their own; None: one set for any number of heads.

    Raises:
        ValueError: A number is smaller than 1, or ``floor`` is negative.

    Source: Kasai et al. 2021 (arXiv 2103.13076), eq. 5.
    """

    def __init__(
        self, head_dim: int, num_features: int | None = None, floor: float = 0.0, num_heads: int | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_features = check_num_features(head_dim if num_features is None else num_features, head_dim)
        self.floor, self.is_positive = check_floor(floor), floor > 0
        bound = 1 / math.sqrt(head_dim)
        self.weight = nn.Parameter(torch.empty(*_heads(num_heads), self.num_features, head_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(*_heads(num_heads), 1, self.num_features).uniform_(-bound, bound))

    def for_heads(self, num_heads: int) -> T2R:
        """Return a fresh map with parameters for each head."""
        return T2R(self.head_dim, self.num_features, self.floor, num_heads)

    def map_query(self, query: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"]:
        """relu(Wx + b), and the floor."""
        x = at_least_float32(query)
        return relative_floor((wide_product(x, self.weight) + self.bias).relu(), x, self.floor)


class Hedgehog(LogFeatureMap):
    """φ(x) = softmax([Wx + b, -Wx - b]) over both halves together; positive, width 2d.

    Queries and keys have a W and b each, the identity and 0 at first. The paper's own form is exp in place of softmax;
    the softmax keeps it bounded, and over a query's features it changes nothing.

    Args:
        head_dim: d, the width of queries and keys.
        num_heads: Heads with parameters of their own; None: one set for any number of heads.
        scaled_dtype: See :class:`LogFeatureMap`.

    Raises:
        ValueError: An unknown ``scaled_dtype``.

    Source: Zhang et al. 2024 (arXiv 2402.04347), section 4.2.
    """

    def __init__(self, head_dim: int, num_heads: int | None = None, scaled_dtype: ScaledDtype = "float64") -> None:
        super().__init__(scaled_dtype)
        self.head_dim, self.num_features = head_dim, 2 * head_dim
        identity = torch.eye(head_dim).expand(*_heads(num_heads), -1, -1)
        self.query_weight, self.key_weight = nn.Parameter(identity.clone()), nn.Parameter(identity.clone())
        self.query_bias, self.key_bias = (nn.Parameter(torch.zeros(*_heads(num_heads), 1, head_dim)) for _ in "qk")

    def for_heads(self, num_heads: int) -> Hedgehog:
        """Return a fresh map with parameters for each head."""
        return Hedgehog(self.head_dim, num_heads, self.scaled_dtype)

    def log_query(self, query: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"]:
        """ln softmax([Wx + b, -Wx - b])."""
        return self._log_softmax(wide_product(query, self.query_weight) + self.query_bias)

    def log_key(self, key: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"]:
        """As :meth:`log_query`, with the keys' W and b."""
        return self._log_softmax(wide_product(key, self.key_weight) + self.key_bias)

    @staticmethod
    def _log_softmax(y: Tensor) -> Tensor:
        return torch.cat((y, -y), dim=-1).log_softmax(-1)


class ReBased(FeatureMap):
    """φ(x) = [y_i², √2 y_i y_j (i < j)] with y = γ·LN(x) + β; signed, width d(d + 1)/2.

    Its kernel (y_q·y_k)² is a square, and 0 where y_q and y_k are orthogonal. Queries and keys have a γ and β each, 1
    and 0 at first.

    Args:
        head_dim: d, the width of queries and keys.
        num_heads: Heads with parameters of their own; None: one set for any number of heads.

    Source: Aksenov et al. 2024 (arXiv 2402.10644), section 4.
    """

    is_positive = False

    def __init__(self, head_dim: int, num_heads: int | None = None) -> None:
        super().__init__()
        self.head_dim, self.num_features = head_dim, head_dim * (head_dim + 1) // 2
        shape = (*_heads(num_heads), 1, head_dim)
        self.query_gain, self.key_gain = (nn.Parameter(torch.ones(shape)) for _ in "qk")
        self.query_bias, self.key_bias = (nn.Parameter(torch.zeros(shape)) for _ in "qk")

    def for_heads(self, num_heads: int) -> ReBased:
        """Return a fresh map with parameters for each head."""
        return ReBased(self.head_dim, num_heads)

    def map_query(self, query: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"]:
        """Squares and products of γ·LN(query) + β."""
        return packed_square(_norm(query) * self.query_gain + self.query_bias)

    def map_key(self, key: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"]:
        """As :meth:`map_query`, with the keys' γ and β."""
        return packed_square(_norm(key) * self.key_gain + self.key_bias)


class LearnedFavor(LogFeatureMap):
    """φ(x) = exp(ωᵀx̃ - ‖x̃‖²/2 + b) / √m with x̃ = x/d^¼ and learned rows ω and b; positive, width m.

    It begins as :class:`FavorPlus`, orthogonal rows and b = 0, so as an unbiased estimate of softmax; then the rows
    move to where the data is instead of being redrawn at random.

    Args:
        head_dim: d, the width of queries and keys.
        num_features: m; by default d·ln d, rounded down and then up to an even number.
        num_heads: Heads with parameters of their own; None: one set for any number of heads.
        scaled_dtype: See :class:`LogFeatureMap`.

    Raises:
        ValueError: A number is smaller than 1, or an unknown ``scaled_dtype``.

    Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 1, for what it begins as; learning the rows is ours.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        num_heads: int | None = None,
        scaled_dtype: ScaledDtype = "float64",
    ) -> None:
        super().__init__(scaled_dtype)
        self.head_dim, self.num_features = head_dim, check_num_features(num_features, head_dim)
        self.rows = nn.Parameter(torch.empty(*_heads(num_heads), self.num_features, head_dim))
        # From torch's own generator, so that a seed gives the same model and layers differ.
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), device="cpu")))
        if self.rows.device.type != "meta":
            with torch.no_grad():
                for rows in self.rows.reshape(-1, self.num_features, head_dim):
                    rows.copy_(orthogonal_rows(self.num_features, head_dim, generator))
        self.bias = nn.Parameter(torch.zeros(*_heads(num_heads), 1, self.num_features))

    def for_heads(self, num_heads: int) -> LearnedFavor:
        """Return a fresh map with parameters for each head."""
        return LearnedFavor(self.head_dim, self.num_features, num_heads, self.scaled_dtype)

    def log_query(self, query: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"]:
        """ωᵀx̃ - ‖x̃‖²/2 + b - ln(m)/2."""
        x = query / self.head_dim**0.25
        half_square = x.square().sum(-1, keepdim=True) / 2
        return wide_product(x, self.rows) + self.bias - (half_square + math.log(self.num_features) / 2)


def _heads(num_heads: int | None) -> tuple[int, ...]:
    """Leading axes of parameters."""
    if num_heads is None:
        return ()
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    return (num_heads,)


def _norm(x: Tensor) -> Tensor:
    x = at_least_float32(x)
    return layer_norm(x, x.shape[-1:])
