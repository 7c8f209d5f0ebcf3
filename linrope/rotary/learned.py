"""Rotary positions with frequencies that are learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linrope.rotary.rotation import Rotation, rotated_width
from linrope.rotary.scaling import inv_freq
from linrope.rotary.turning import Pairing


class LearnedRotary(Rotation):
    """Rotary positions whose frequencies are parameters, which begin as those of :class:`Rotary`.

    Their logarithms are learned, so that a step changes slow and fast pairs by the same share. Each layer makes
    parameters of its own of the settings that it is given, for its own width. They stay float32 or wider whatever the
    module is cast to, and angles are computed in float64 as elsewhere.

    Args:
        base: Of the first frequencies.
        fraction: Share of the features that turn, in (0, 1].
        pairing: As in :class:`Rotary`.
        num_heads: Heads that learn frequencies of their own; None: all share them.
        num_features: m, the width of the features. None: settings alone, of which layers make their rotation.

    Raises:
        ValueError: ``base`` is not positive, ``fraction`` outside (0, 1], an unknown ``pairing``, or a rotated width that
            makes no pairs.

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.2.2, with its frequencies as parameters.
    """

    def __init__(
        self,
        base: float = 10_000.0,
        fraction: float = 1.0,
        pairing: Pairing = "interleaved",
        num_heads: int | None = None,
        num_features: int | None = None,
    ) -> None:
        if not base > 0:
            raise ValueError(f"base must be positive, got {base}")
        if num_heads is not None and num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {num_heads}")
        super().__init__(fraction, pairing, num_heads)
        self.base = float(base)
        self.log_inv_freq: nn.Parameter | None = None
        if num_features is not None:
            width = rotated_width(num_features, fraction)
            if width < 2 or width % 2:
                raise ValueError(
                    f"rotation needs an even width, got {width} ({fraction:g} of the {num_features} features)"
                )
            first = inv_freq(width, self.base).log().to(torch.promote_types(torch.get_default_dtype(), torch.float32))
            # Of one axis or three: optimizers for matrices leave them alone.
            self.log_inv_freq = nn.Parameter(first if num_heads is None else first.repeat(num_heads, 1, 1))

    def for_width(self, num_features: int) -> LearnedRotary:
        """Return a rotation of these settings with parameters of its own, for features of this width; this one if it is one.

        Raises:
            ValueError: Not one pair is left to turn, or this one is for another width.
        """
        if self.log_inv_freq is not None:
            self._check_width(rotated_width(num_features, self.fraction))
            return self
        settings: Any = super().for_width(num_features)
        return LearnedRotary(self.base, settings.fraction, self.pairing, self.num_heads, num_features)

    def angles(self, positions: Tensor, width: int, seq_len: Tensor) -> Tensor:  # noqa: D102
        if self.log_inv_freq is None:
            raise ValueError("LearnedRotary() has no frequencies yet: pass num_features, or give it to a layer")
        self._check_width(width)
        frequencies = self.log_inv_freq.to(positions.device, torch.float64).exp()
        return positions[..., None] * frequencies

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LearnedRotary:
        wide = None if self.log_inv_freq is None else self.log_inv_freq.data
        super()._apply(fn, recurse)
        if wide is not None and self.log_inv_freq is not None and torch.finfo(self.log_inv_freq.dtype).bits < 32:
            self.log_inv_freq.data = wide.to(self.log_inv_freq.device)
        return self

    def _check_width(self, width: int) -> None:
        learned = 0 if self.log_inv_freq is None else 2 * self.log_inv_freq.shape[-1]
        if learned != width:
            raise ValueError(f"this rotation has learned frequencies for {learned} features that turn, got {width}")

    def extra_repr(self) -> str:  # noqa: D102
        heads = "" if self.num_heads is None else f", num_heads={self.num_heads}"
        return f"base={self.base:g}, {super().extra_repr()}{heads}"
