"""Rotary positions in two dimensions, for images."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from linrope.rotary.rotation import Rotation
from linrope.rotary.scaling import inv_freq
from linrope.rotary.turning import Pairing


class AxialRotary(Rotation):
    """Two-dimensional positions: half of the pairs turn with the row, the other half with the column.

    Tokens are numbered row by row, as patches of an image are when flattened: position p lies in row ⌊p/columns⌋ and
    column p mod columns. Products of rotated vectors depend on the two distances alone, so they are what a non-causal
    layer over an image wants. Pair i of the w/4 pairs of each axis turns by base^(-4i/w) a step.

    Args:
        columns: Tokens in a row.
        base: Dimensionless; wavelengths run from 2π to 2π·base rows or columns.
        fraction: Share of the features that turn, in (0, 1].
        pairing: As in :class:`Rotary`.

    Raises:
        ValueError: ``columns`` below 1, ``base`` is not positive, ``fraction`` outside (0, 1], an unknown ``pairing``.

    Source: Heo et al. 2024 (arXiv 2403.13298), section 3.2, and its base.
    """

    multiple = 4

    def __init__(
        self, columns: int, base: float = 100.0, fraction: float = 1.0, pairing: Pairing = "interleaved"
    ) -> None:
        if columns < 1:
            raise ValueError(f"columns must be at least 1, got {columns}")
        if not base > 0:
            raise ValueError(f"base must be positive, got {base}")
        super().__init__(fraction, pairing)
        self.columns, self.base = columns, float(base)

    def angles(self, positions: Tensor, width: int, seq_len: Tensor) -> Tensor:  # noqa: D102
        row = (positions / self.columns).floor()
        column = positions - row * self.columns
        frequencies = inv_freq(width // 2, self.base, device=positions.device)
        return torch.cat([x[..., None] * frequencies for x in (row, column)], dim=-1)

    @property
    def settings(self) -> Hashable:  # noqa: D102
        return self.columns, self.base

    def extra_repr(self) -> str:  # noqa: D102
        return f"columns={self.columns}, base={self.base:g}, {super().extra_repr()}"
