"""The contract of a feature map that is known by its logarithm, so that no feature overflows or vanishes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from linrope.feature_maps.base import FeatureMap
from linrope.precision import at_least_float32

# Largest exponent of a scaled feature. Two features of e^30 and sums over e^28 terms of their products fit
# into float32, and so do products that are e^-118 of the largest, with their gradients.
_PEAK = 30.0

ScaledDtype = Literal["float32", "float64"]


class LogFeatureMap(FeatureMap):
    """φ = exp(log φ), positive; a subclass gives log φ.

    No maximum over the sequence is subtracted; each key carries a log-scale of its own
    (:meth:`scaled_key`), so nothing later moves an earlier output.

    Args:
        scaled_dtype: Least precision of the features that layers use, and so of their sums. A query and
            a key that peak in different features have a kernel far below both peaks: e^-140 of them
            for FAVOR+ at d = 64 and entries of 30, where float32 ends at e^-118. ``"float32"`` is
            enough, and twice as fast on a CPU, where entries are of order 1, as behind a layer norm.

    Raises:
        ValueError: An unknown ``scaled_dtype``.
    """

    is_positive = True

    def __init__(self, scaled_dtype: ScaledDtype = "float64") -> None:
        super().__init__()
        if scaled_dtype not in ("float32", "float64"):
            raise ValueError(f"scaled_dtype must be 'float32' or 'float64', got {scaled_dtype!r}")
        self.scaled_dtype: ScaledDtype = scaled_dtype

    @abstractmethod
    def log_query(self, query: Float[Tensor, "*batch d"], *positions: Tensor) -> Float[Tensor, "*batch m"]:
        """Logarithm of φ_q of each query."""

    def log_key(self, key: Float[Tensor, "*batch d"], *positions: Tensor) -> Float[Tensor, "*batch m"]:
        """Logarithm of φ_k of each key; that of φ_q by default."""
        return self.log_query(key, *positions)

    def map_query(self, query: Float[Tensor, "*batch d"], *positions: Tensor) -> Float[Tensor, "*batch m"]:
        """φ_q of each query; may overflow or vanish where the formula does."""
        return self.log_query(at_least_float32(query), *positions).exp()

    def map_key(self, key: Float[Tensor, "*batch d"], *positions: Tensor) -> Float[Tensor, "*batch m"]:
        """φ_k of each key; may overflow or vanish where the formula does."""
        return self.log_key(at_least_float32(key), *positions).exp()

    def scaled_query(self, query: Float[Tensor, "*batch d"], *positions: Tensor) -> Float[Tensor, "*batch m"]:
        """φ_q of each query up to a positive factor of its own; neither overflows nor vanishes."""
        return _split_scale(self.log_query(self._widen(query), *positions))[0]

    def scaled_key(
        self, key: Float[Tensor, "*batch d"], *positions: Tensor
    ) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch"]]:
        """φ_k of each key as ``features * exp(log_scale)``, up to one factor common to all keys."""
        return _split_scale(self.log_key(self._widen(key), *positions))

    def _widen(self, x: Tensor) -> Tensor:
        # Apple's GPUs have no float64.
        return x.double() if self.scaled_dtype == "float64" and x.device.type != "mps" else at_least_float32(x)


def _split_scale(log_features: Tensor) -> tuple[Tensor, Tensor]:
    """exp(log_features) as features that peak at exp(_PEAK), and the logarithm of what was divided out."""
    # Attention does not depend on the split, so no gradient flows through it.
    log_scale = log_features.detach().amax(-1, keepdim=True) - _PEAK
    return (log_features - log_scale).exp(), log_scale.squeeze(-1)
