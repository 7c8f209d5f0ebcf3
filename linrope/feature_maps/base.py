"""The contract of a feature map."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor, nn

from linrope.feature_maps.projection import RandomProjection


class FeatureMap(nn.Module, ABC):
    """φ, which turns the kernel of linear attention into a dot product: k(q, k) = φ_q(q)·φ_k(k).

    A subclass sets the first three attributes and writes ``map_query``, and ``map_key`` where it differs; that
    is all a map needs in order to be trained, streamed and rotated. Features of half-precision inputs are
    float32: sums over many tokens are made of them.

    Attributes:
        head_dim: d, the width that goes in.
        num_features: m, the width that comes out.
        is_positive: Whether every feature is > 0.
        kernel_is_positive: Whether φ_q(q)·φ_k(k) > 0 for all q and k, which keeps the normalizer away
            from zero. So it is for positive features; signed ones that promise it say so.
        uses_positions: Whether the map is given the positions of its tokens too.
    """

    head_dim: int
    num_features: int
    is_positive: bool
    uses_positions: bool = False

    @property
    def kernel_is_positive(self) -> bool:  # noqa: D102
        if not hasattr(self, "is_positive"):  # an AttributeError here would be taken for one of this property
            raise TypeError(f"{type(self).__name__} does not say whether it is_positive")
        return self.is_positive

    @abstractmethod
    def map_query(self, query: Float[Tensor, "*batch d"], *positions: Tensor) -> Float[Tensor, "*batch m"]:
        """φ_q of each query; ``positions`` (tokens) are given where :attr:`uses_positions` says so."""

    def map_key(self, key: Float[Tensor, "*batch d"], *positions: Tensor) -> Float[Tensor, "*batch m"]:
        """φ_k of each key; φ_q by default."""
        return self.map_query(key, *positions)

    def scaled_query(self, query: Float[Tensor, "*batch d"], *positions: Tensor) -> Float[Tensor, "*batch m"]:
        """φ_q of each query up to a positive factor of its own, which attention divides out.

        Exponential maps override it, so that no feature overflows.
        """
        return self.map_query(query, *positions)

    def scaled_key(
        self, key: Float[Tensor, "*batch d"], *positions: Tensor
    ) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch"] | None]:
        """φ_k of each key as ``features * exp(log_scale)``; ``log_scale`` is None where it is 0.

        Exponential maps override it: a scale that a key carries along is exact, where a maximum taken
        over the sequence would leak the future.
        """
        return self.map_key(key, *positions), None

    def for_heads(self, num_heads: int) -> FeatureMap:
        """Return the map for ``(b, h, n, d)`` with h = ``num_heads``; learned maps have parameters for each head."""
        del num_heads
        return self

    def redraw(self, step: int, layer: int) -> None:
        """Draw the random projections anew, as a function of (seed, ``step``, ``layer``) alone.

        Args:
            step: Optimizer steps taken so far.
            layer: Index of the map in its model, so that layers differ.
        """
        for module in self.modules():
            if isinstance(module, RandomProjection):
                module.redraw(step, layer)

    def extra_repr(self) -> str:  # noqa: D102
        return f"head_dim={self.head_dim}, num_features={self.num_features}"


def redraw_feature_maps(model: nn.Module, step: int) -> None:
    """Tell every feature map of ``model`` how many optimizer steps were taken; random ones redraw when due.

    Call it after each optimizer step in training. ``step`` 0 gives each layer a projection of its own.
    """
    maps = (module for module in model.modules() if isinstance(module, FeatureMap))
    for layer, feature_map in enumerate(maps):
        feature_map.redraw(step, layer)


def relative_floor(features: Tensor, x: Tensor, floor: float, degree: int = 1) -> Tensor:
    """features + floor·(1 + ‖x‖²/d)^(degree/2): positive, however large x is, and as large as x makes ``features``."""
    if floor == 0:
        return features
    size = 1 + x.square().mean(-1, keepdim=True)
    return features + floor * (size if degree == 2 else size.sqrt())


def check_floor(floor: float) -> float:
    """Return ``floor``; ValueError if it is negative or infinite."""
    if not 0 <= floor < float("inf"):
        raise ValueError(f"floor must be at least 0 and finite, got {floor}")
    return floor
