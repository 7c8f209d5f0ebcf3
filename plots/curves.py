"""From the runs of one arm to one curve with its uncertainty: pure numbers, no drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from plots.runs import Run


class Curve(NamedTuple):
    """Mean over seeds at ``x`` and half the width of its 95% interval (None for one seed)."""

    x: np.ndarray
    mean: np.ndarray
    half: np.ndarray | None


def half_interval(values: np.ndarray) -> np.ndarray:
    """Half the width of the 95% t-interval of the mean along the first axis.

    t(0.975, n−1) · s / √n for n independent values with sample deviation s; in their unit.

    Raises:
        ValueError: Fewer than two values, which say nothing about their spread.
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"an interval needs at least 2 values, got {count}")
    return stats.t.ppf(0.975, count - 1) * np.std(values, axis=0, ddof=1) / math.sqrt(count)


def trailing_mean(step: np.ndarray, values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the values whose step lies in (s − window, s], for every s in ``step``.

    It looks back only, so no point knows what came after it; the first ones average fewer values.

    Args:
        step: Optimizer steps, increasing.
        values: One finite value per step.
        window: Width in steps, at least 1 (which returns the values as they are).
    """
    total = np.concatenate([[0.0], np.cumsum(values)])
    first = np.searchsorted(step, step - window, side="right")
    last = np.arange(1, len(step) + 1)
    return (total[last] - total[first]) / (last - first)


def over_seeds(runs: Sequence[Run], x: str, y: str, *, window: int = 1) -> Curve:
    """Average column ``y`` against column ``x`` over the runs of one arm.

    Seeds reach one step after different seconds, so every run is interpolated on the points of the
    run that ends first, and nothing is said beyond its end: the mean is of the same seeds throughout.

    Args:
        runs: The seeds of one arm.
        x: ``step``, ``tokens`` (bytes) or ``seconds``.
        y: ``train/bpc`` or ``val/bpc``, bits per byte.
        window: Width in steps of the trailing mean taken first.

    Returns:
        The curve; empty when some run has no finite value.
    """
    lines = []
    for run in runs:
        finite = np.isfinite(run.metrics[x]) & np.isfinite(run.metrics[y])
        smooth = trailing_mean(run.metrics["step"][finite], run.metrics[y][finite], window)
        lines.append((run.metrics[x][finite], smooth))
    if any(line_x.size == 0 for line_x, _ in lines):
        return Curve(np.empty(0), np.empty(0), None)
    start = max(line_x[0] for line_x, _ in lines)
    shortest = min((line_x for line_x, _ in lines), key=lambda line_x: line_x[-1])
    grid = shortest[shortest >= start]
    values = np.stack([np.interp(grid, *line) for line in lines])
    return Curve(grid, values.mean(axis=0), half_interval(values) if len(values) > 1 else None)
