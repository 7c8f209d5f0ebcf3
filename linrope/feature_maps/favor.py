"""FAVOR+: positive orthogonal random features of the softmax kernel."""

from __future__ import annotations

import hashlib
import math
from contextlib import nullcontext
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from linrope.feature_maps.base import FeatureMap

# Largest exponent of a scaled feature. Two features of e^30 and sums over e^28 terms of their products fit
# into float32, and so do products that are e^-118 of the largest, with their gradients.
_PEAK = 30.0


class FavorPlus(FeatureMap):
    """φ(x) = exp(ωᵀx̃ - ‖x̃‖²/2) / √m with x̃ = x / d^¼ and random rows ω ~ N(0, I); positive, width m.

    φ(q)·φ(k) is an unbiased estimate of the softmax kernel exp(q·k/√d). Queries and keys share one
    projection, which is a buffer: saved with the weights, redrawn in training only, when
    :meth:`redraw` says so, and never inside forward.

    No maximum over the sequence is subtracted; each key carries a log-scale of its own
    (:meth:`scaled_key`), so nothing later moves an earlier output.

    Args:
        head_dim: d, the width of queries and keys.
        num_features: m; by default d·ln d, rounded down and then up to an even number.
        orthogonal: Rows of each block of d are orthogonal, with the norms of independent Gaussian
            rows; lower variance than independent rows.
        redraw_interval: Optimizer steps between two draws; None keeps the first draw for ever.
        seed: The projection is a function of (seed, step, layer), the same in every process.
        scaled_dtype: Least precision of the features that layers use, and so of their sums. A query and
            a key that peak in different features have a kernel far below both peaks: e^-140 of them
            at d = 64 and entries of 30, where float32 ends at e^-118. ``"float32"`` is enough, and
            twice as fast on a CPU, where ‖x̃‖ stays below about 20, as it does behind a layer norm.

    Raises:
        ValueError: ``head_dim``, ``num_features`` or ``redraw_interval`` is smaller than 1, or an unknown
            ``scaled_dtype``.

    Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 1 and section 2.4.
    """

    is_positive = True
    projection: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        orthogonal: bool = True,
        redraw_interval: int | None = 1000,
        seed: int = 0,
        scaled_dtype: Literal["float32", "float64"] = "float64",
    ) -> None:
        super().__init__()
        if scaled_dtype not in ("float32", "float64"):
            raise ValueError(f"scaled_dtype must be 'float32' or 'float64', got {scaled_dtype!r}")
        if num_features is None:
            num_features = max(2, int(head_dim * math.log(head_dim))) if head_dim > 0 else 0
            num_features += num_features % 2
        for name, number in (
            ("head_dim", head_dim),
            ("num_features", num_features),
            ("redraw_interval", redraw_interval),
        ):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self.head_dim, self.num_features = head_dim, num_features
        self.orthogonal, self.redraw_interval, self.seed = orthogonal, redraw_interval, seed
        self.scaled_dtype = scaled_dtype
        self.register_buffer("projection", torch.empty(num_features, head_dim, dtype=torch.float32))
        self.redraw(step=0, layer=0)

    def map_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """φ of each query; may overflow where ‖ω‖ is large, as the formula does."""
        return self._log_features(query).exp() / math.sqrt(self.num_features)

    def map_key(self, key: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """φ of each key; may underflow where ‖x‖ is large, as the formula does."""
        return self._log_features(key).exp() / math.sqrt(self.num_features)

    def scaled_query(self, query: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch m"]:
        """φ of each query up to a positive factor of its own; neither overflows nor vanishes."""
        return _split_scale(self._log_features(self._widen(query)))[0]

    def scaled_key(self, key: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch"]]:
        """φ of each key as ``features * exp(log_scale)``, up to one factor common to all keys."""
        return _split_scale(self._log_features(self._widen(key)))

    def redraw(self, step: int, layer: int) -> None:
        """Draw the projection afresh if ``step`` is 0 or a multiple of ``redraw_interval``."""
        if step and (self.redraw_interval is None or step % self.redraw_interval):
            return
        digest = hashlib.sha256(f"{self.seed} {step} {layer}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        draw = orthogonal_rows if self.orthogonal else gaussian_rows
        rows = draw(self.num_features, self.head_dim, generator)
        if self.projection.device.type != "meta":
            with torch.no_grad():
                self.projection.copy_(rows)

    def _widen(self, x: Tensor) -> Tensor:
        # Apple's GPUs have no float64.
        return x.double() if self.scaled_dtype == "float64" and x.device.type != "mps" else x

    def _log_features(self, x: Tensor) -> Tensor:
        """ωᵀx̃ - ‖x̃‖²/2, in float32 or wider also under autocast: the exponents reach thousands."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        # The meta device knows no autocast.
        with nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype) / self.head_dim**0.25
            return x @ self.projection.to(dtype).mT - x.square().sum(-1, keepdim=True) / 2


def _split_scale(log_features: Tensor) -> tuple[Tensor, Tensor]:
    """exp(log_features) as features that peak at exp(_PEAK), and the logarithm of what was divided out."""
    # Attention does not depend on the split, so no gradient flows through it.
    log_scale = log_features.detach().amax(-1, keepdim=True) - _PEAK
    return (log_features - log_scale).exp(), log_scale.squeeze(-1)


def gaussian_rows(num_rows: int, width: int, generator: torch.Generator) -> Float[Tensor, "rows width"]:
    """Independent rows ~ N(0, I), float64 on the CPU."""
    return torch.randn(num_rows, width, generator=generator, dtype=torch.float64, device="cpu")


def orthogonal_rows(num_rows: int, width: int, generator: torch.Generator) -> Float[Tensor, "rows width"]:
    """Rows that are each N(0, I) alone and orthogonal within blocks of ``width``, float64 on the CPU.

    Directions come from the QR decomposition of Gaussian blocks, with signs that make it unique and the
    directions uniform; norms are those of independent Gaussian rows, so χ(width).

    Source: Yu et al. 2016 (arXiv 1610.09072), section 3; Mezzadri 2007 (math-ph/0609050) for the signs.
    """
    blocks = []
    for _ in range(math.ceil(num_rows / width)):
        q, r = torch.linalg.qr(gaussian_rows(width, width, generator))
        blocks.append((q * r.diagonal().sign()).mT)
    directions = torch.cat(blocks)[:num_rows]
    return directions * gaussian_rows(num_rows, width, generator).norm(dim=-1, keepdim=True)
