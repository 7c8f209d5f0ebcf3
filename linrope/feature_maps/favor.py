"""FAVOR+ and its kin: random features of the softmax kernel, positive ones and the older trigonometric ones.

All of them estimate exp(q·k/√d) = exp(q̃·k̃) with x̃ = x / d^¼ by an average over rows ω ~ N(0, I), except
:class:`FavorReLU`, whose kernel is another. Queries and keys share one projection.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from linrope.feature_maps.base import FeatureMap, check_floor
from linrope.feature_maps.logarithmic import LogFeatureMap, ScaledDtype
from linrope.feature_maps.projection import RandomProjection, check_num_features
from linrope.precision import at_least_float32


class FavorPlus(LogFeatureMap):
    """φ(x) = exp(ωᵀx̃ - ‖x̃‖²/2) / √m; positive, width m.

    Args:
        head_dim: d, the width of queries and keys.
        num_features: m; by default d·ln d, rounded down and then up to an even number.
        orthogonal: See :class:`RandomProjection`.
        redraw_interval: Optimizer steps between two draws; None keeps the first draw for ever.
        seed: The projection is a function of (seed, step, layer), the same in every process.
        scaled_dtype: See :class:`LogFeatureMap`.

    Raises:
        ValueError: ``head_dim``, ``num_features`` or ``redraw_interval`` is smaller than 1, or an unknown
            ``scaled_dtype``.

    Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 1 and section 2.4.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        orthogonal: bool = True,
        redraw_interval: int | None = 1000,
        seed: int = 0,
        scaled_dtype: ScaledDtype = "float64",
    ) -> None:
        super().__init__(scaled_dtype)
        self.head_dim, self.num_features = head_dim, check_num_features(num_features, head_dim)
        self.projection = RandomProjection(
            self.num_features, head_dim, orthogonal=orthogonal, redraw_interval=redraw_interval, seed=seed
        )

    def log_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """ωᵀx̃ - ‖x̃‖²/2 - ln(m)/2."""
        x = query / self.head_dim**0.25
        return self.projection(x) - (_half_square(x) + math.log(self.num_features) / 2)


class FavorHyperbolic(LogFeatureMap):
    """φ(x) = [exp(ωᵀx̃), exp(-ωᵀx̃)] · exp(-‖x̃‖²/2) / √m; positive, width m, of two halves.

    Each row serves twice, which lowers the variance below that of :class:`FavorPlus` with as many features.
    Half-split pairing turns exp(u) together with exp(-u), interleaved pairing turns neighbours of a half.

    Args:
        head_dim: d, the width of queries and keys.
        num_features: m, even; by default d·ln d, rounded down and then up to an even number.
        orthogonal: See :class:`RandomProjection`.
        redraw_interval: Optimizer steps between two draws; None keeps the first draw for ever.
        seed: The projection is a function of (seed, step, layer), the same in every process.
        scaled_dtype: See :class:`LogFeatureMap`.

    Raises:
        ValueError: As :class:`FavorPlus`, or an odd ``num_features``.

    Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 1 (SM^hyp+).
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        orthogonal: bool = True,
        redraw_interval: int | None = 1000,
        seed: int = 0,
        scaled_dtype: ScaledDtype = "float64",
    ) -> None:
        super().__init__(scaled_dtype)
        self.head_dim, self.num_features = head_dim, check_num_features(num_features, head_dim, even=True)
        self.projection = RandomProjection(
            self.num_features // 2, head_dim, orthogonal=orthogonal, redraw_interval=redraw_interval, seed=seed
        )

    def log_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """±ωᵀx̃ - ‖x̃‖²/2 - ln(m)/2."""
        x = query / self.head_dim**0.25
        exponent = self.projection(x)
        return torch.cat((exponent, -exponent), dim=-1) - (_half_square(x) + math.log(self.num_features) / 2)


class FavorPlusPlus(LogFeatureMap):
    """φ(x) = (1 - 4A)^(d/4) · exp(A‖ω‖² + √(1 - 4A)·ωᵀx̃ - ‖x̃‖²/2) / √m with A < 0; positive, width m.

    Long rows ω, which rule the variance of :class:`FavorPlus` (A = 0), weigh less; still unbiased. The variance is
    lower where queries and keys are as long as it is told, and may be higher elsewhere. Its second moment, (1-4A)^d (1-8A)^(-d/2) exp(2(1-4A)/(1-8A)·‖q̃+k̃‖² - ‖q̃‖² - ‖k̃‖²), is least at

        A = (1 - 1/ρ)/8,  ρ = (√((2s + d)² + 8ds) - 2s - d) / 4s,  s = ‖q̃+k̃‖².

    The paper takes s from the keys and queries at hand, which would let a later key change an earlier output;
    here it is given.

    Args:
        head_dim: d, the width of queries and keys.
        num_features: m; by default d·ln d, rounded down and then up to an even number.
        square: The ‖q̃+k̃‖² at which the variance is least; by default 2√d/3, its mean where entries of q
            and k are independent and of variance 1/3, as fresh projections of a layer norm's output are.
        orthogonal: See :class:`RandomProjection`.
        redraw_interval: Optimizer steps between two draws; None keeps the first draw for ever.
        seed: The projection is a function of (seed, step, layer), the same in every process.
        scaled_dtype: See :class:`LogFeatureMap`.

    Raises:
        ValueError: As :class:`FavorPlus`, or ``square`` is not above 0.

    Source: Likhosherstov et al. 2022 (arXiv 2205.15317), the optimal positive random features.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        square: float | None = None,
        orthogonal: bool = True,
        redraw_interval: int | None = 1000,
        seed: int = 0,
        scaled_dtype: ScaledDtype = "float64",
    ) -> None:
        super().__init__(scaled_dtype)
        self.head_dim, self.num_features = head_dim, check_num_features(num_features, head_dim)
        s = 2 / 3 * math.sqrt(head_dim) if square is None else square
        if not 0 < s < math.inf:
            raise ValueError(f"square must be above 0 and finite, got {s}")
        d = head_dim
        # The paper's ρ, expanded by the sum of its two terms, whose difference cancels where s is small.
        rho = 2 * d / (math.hypot(2 * s + d, math.sqrt(8 * d * s)) + 2 * s + d)
        self.damping = (1 - 1 / rho) / 8
        self.projection = RandomProjection(
            self.num_features, head_dim, orthogonal=orthogonal, redraw_interval=redraw_interval, seed=seed
        )

    def log_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """A‖ω‖² + √(1 - 4A)·ωᵀx̃ - ‖x̃‖²/2 + d/4·ln(1 - 4A) - ln(m)/2."""
        x = query / self.head_dim**0.25
        stretch = 1 - 4 * self.damping
        constant = self.head_dim / 4 * math.log(stretch) - math.log(self.num_features) / 2
        of_row = self.damping * self.projection.rows.to(x.dtype).square().sum(-1) + constant
        return of_row + math.sqrt(stretch) * self.projection(x) - _half_square(x)


class FavorReLU(FeatureMap):
    """φ(x) = (relu(ωᵀx) + floor) / √m; positive where ``floor`` is, width m.

    Its kernel, for ``floor`` 0 and on average, is the arc-cosine kernel ‖q‖‖k‖ (sin θ + (π - θ) cos θ) / 2π, θ the
    angle between q and k.

    Args:
        head_dim: d, the width of queries and keys.
        num_features: m; by default d·ln d, rounded down and then up to an even number.
        floor: Added to every feature; 0 gives a normalizer that can be 0.
        orthogonal: See :class:`RandomProjection`.
        redraw_interval: Optimizer steps between two draws; None keeps the first draw for ever.
        seed: The projection is a function of (seed, step, layer), the same in every process.

    Raises:
        ValueError: A size is smaller than 1, or ``floor`` is negative.

    Source: Choromanski et al. 2021 (arXiv 2009.14794), section 2.2 (Performer-ReLU); Cho and Saul 2009, eq. 6.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        floor: float = 1e-3,
        orthogonal: bool = True,
        redraw_interval: int | None = 1000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.head_dim, self.num_features = head_dim, check_num_features(num_features, head_dim)
        self.floor, self.is_positive = check_floor(floor), floor > 0
        self.projection = RandomProjection(
            self.num_features, head_dim, orthogonal=orthogonal, redraw_interval=redraw_interval, seed=seed
        )

    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """(relu(ωᵀx) + floor) / √m."""
        return (self.projection(query).relu() + self.floor) / math.sqrt(self.num_features)


class RandomFourier(FeatureMap):
    """φ(x) = [sin(ωᵀx̃), cos(ωᵀx̃)] · exp(‖x̃‖²/2) · √(2/m); signed, width m, of two halves.

    The estimate of the kernel that FAVOR+ replaces: it can be negative, and its error is largest where the kernel is
    smallest, so a layer does not divide by its sums.

    Args:
        head_dim: d, the width of queries and keys.
        num_features: m, even; by default d·ln d, rounded down and then up to an even number.
        orthogonal: See :class:`RandomProjection`.
        redraw_interval: Optimizer steps between two draws; None keeps the first draw for ever.
        seed: The projection is a function of (seed, step, layer), the same in every process.

    Raises:
        ValueError: A size is smaller than 1, or an odd ``num_features``.

    Source: Rahimi and Recht 2007; Choromanski et al. 2021 (arXiv 2009.14794), eq. 5 (SM^trig).
    """

    is_positive = False

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        orthogonal: bool = True,
        redraw_interval: int | None = 1000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.head_dim, self.num_features = head_dim, check_num_features(num_features, head_dim, even=True)
        self.projection = RandomProjection(
            self.num_features // 2, head_dim, orthogonal=orthogonal, redraw_interval=redraw_interval, seed=seed
        )

    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """The features; they overflow where exp(‖x̃‖²/2) does."""
        features, half_square = self._split(query)
        return features * half_square.exp()[..., None]

    def scaled_query(self, query: Float[Tensor, "*batch d"], *positions: Tensor) -> Float[Tensor, "*batch m"]:
        """The features without exp(‖x̃‖²/2)."""
        return self._split(query)[0]

    def scaled_key(
        self, key: Float[Tensor, "*batch d"], *positions: Tensor
    ) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch"]]:
        """The features without exp(‖x̃‖²/2), and ‖x̃‖²/2."""
        return self._split(key)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = at_least_float32(x) / self.head_dim**0.25
        angle = self.projection(x)
        waves = torch.cat((angle.sin(), angle.cos()), dim=-1) * math.sqrt(2 / self.num_features)
        return waves, _half_square(x).squeeze(-1)


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2
