"""Rotary positions whose products decay with distance, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Hashable

from torch import Tensor

from linrope.rotary.rotation import Rotation, rotated_width
from linrope.rotary.scaling import inv_freq
from linrope.rotary.turning import Pairing


class XPos(Rotation):
    """Rotary positions, and each pair's product times ζ_i^(distance/scale_base): fast pairs fade first.

    ζ_i = (i/(w/2) + gamma)/(1 + gamma) for pair i of w features that turn. It stands in the numerator of causal linear
    attention, with what does not turn left as it is.

    Args:
        base: As in :class:`Rotary`.
        fraction: Share of the features that turn, in (0, 1].
        pairing: As in :class:`Rotary`.
        scale_base: Tokens after which pair i has faded to ζ_i.
        gamma: Sets the fastest pair's ζ_0 = gamma/(1 + gamma).

    Raises:
        ValueError: ``base``, ``scale_base`` or ``gamma`` is not positive, ``fraction`` outside (0, 1], an unknown
            ``pairing``.

    Source: Sun et al. 2022 (arXiv 2212.10554), section 3.2 and appendix; its defaults.
    """

    def __init__(
        self,
        base: float = 10_000.0,
        fraction: float = 1.0,
        pairing: Pairing = "interleaved",
        scale_base: float = 512.0,
        gamma: float = 0.4,
    ) -> None:
        for name, value in (("base", base), ("scale_base", scale_base), ("gamma", gamma)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        super().__init__(fraction, pairing)
        self.base, self.scale_base, self.gamma = float(base), float(scale_base), float(gamma)

    def angles(self, positions: Tensor, width: int, seq_len: Tensor) -> Tensor:  # noqa: D102
        return positions[..., None] * inv_freq(width, self.base, device=positions.device)

    def rates(self, num_features: int) -> tuple[float, ...]:  # noqa: D102
        pairs = rotated_width(num_features, self.fraction) // 2
        zeta = [(i / pairs + self.gamma) / (1 + self.gamma) for i in range(pairs)]
        of_pairs = [-math.log(z) / self.scale_base for z in zeta]
        turning = of_pairs * 2 if self.pairing == "half" else [rate for rate in of_pairs for _ in range(2)]
        return (*turning, *[0.0] * (num_features - len(turning)))

    @property
    def settings(self) -> Hashable:  # noqa: D102
        return self.base

    def extra_repr(self) -> str:  # noqa: D102
        return f"base={self.base:g}, {super().extra_repr()}, scale_base={self.scale_base:g}, gamma={self.gamma:g}"
