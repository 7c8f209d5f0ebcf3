"""The contract of a feature map."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor, nn


class FeatureMap(nn.Module, ABC):
    """φ, which turns the kernel of linear attention into a dot product: k(q, k) = φ_q(q)·φ_k(k).

    A subclass sets the three attributes and writes the two methods; that is all a map needs in order to
    be trained, streamed and rotated. Features of half-precision inputs are float32: sums over many
    tokens are made of them.

    Attributes:
        head_dim: d, the width that goes in.
        num_features: m, the width that comes out.
        is_positive: Whether every feature is > 0, which keeps the normalizer away from zero.
    """

    head_dim: int
    num_features: int
    is_positive: bool

    @abstractmethod
    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """φ_q of each query."""

    @abstractmethod
    def map_key(self, key: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """φ_k of each key."""

    def scaled_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """φ_q of each query up to a positive factor of its own, which attention divides out.

        Exponential maps override it, so that no feature overflows.
        """
        return self.map_query(query)

    def scaled_key(
        self, key: Float[Tensor, "*batch d"]
    ) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch"] | None]:
        """φ_k of each key as ``features * exp(log_scale)``; ``log_scale`` is None where it is 0.

        Exponential maps override it: a scale that a key carries along is exact, where a maximum taken
        over the sequence would leak the future.
        """
        return self.map_key(key), None

    def redraw(self, step: int, layer: int) -> None:
        """Draw the random parameters anew, as a function of (seed, ``step``, ``layer``) alone.

        Deterministic maps have none and do nothing.

        Args:
            step: Optimizer steps taken so far.
            layer: Index of the map in its model, so that layers differ.
        """
        del step, layer

    def extra_repr(self) -> str:  # noqa: D102
        return f"head_dim={self.head_dim}, num_features={self.num_features}"


def redraw_feature_maps(model: nn.Module, step: int) -> None:
    """Tell every feature map of ``model`` how many optimizer steps were taken; random ones redraw when due.

    Call it after each optimizer step in training. ``step`` 0 gives each layer a projection of its own.
    """
    maps = (module for module in model.modules() if isinstance(module, FeatureMap))
    for layer, feature_map in enumerate(maps):
        feature_map.redraw(step, layer)
