"""Where to put the names at the ends of lines so that none covers another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> np.ndarray:
    """Move heights apart to at least ``gap``, as little as possible in least squares.

    With z_i = wanted_i − i·gap the neighbours' condition is that z never falls, and the closest such
    z pools each run of violators into its mean.

    Args:
        wanted: Heights, in any order and any one unit.
        gap: Smallest distance between two; made smaller when they do not fit otherwise.
        low: Lowest height allowed.
        high: Highest height allowed.

    Returns:
        The new heights, in the order of ``wanted``.
    """
    order = np.argsort(wanted, kind="stable")
    count = len(order)
    gap = min(gap, (high - low) / max(count - 1, 1))
    pools: list[tuple[float, int]] = []  # (sum, size), means never falling
    for rank, index in enumerate(order):
        total, size = wanted[index] - rank * gap, 1
        while pools and pools[-1][0] / pools[-1][1] > total / size:
            total, size = total + pools[-1][0], size + pools[-1][1]
            pools.pop()
        pools.append((total, size))
    means = np.repeat([total / size for total, size in pools], [size for _, size in pools])
    heights = np.empty(count)
    heights[order] = np.clip(means, low, high - (count - 1) * gap) + np.arange(count) * gap
    return heights
