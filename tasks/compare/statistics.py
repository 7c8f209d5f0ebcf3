"""What seeds can tell: paired differences, their tests, and when a curve arrives at a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from plots.curves import half_interval
from plots.runs import Run

LEVEL = 0.05
"""A p value below this is called a difference."""

_MOST_RESAMPLES = 2**14  # all sign flips of 14 seeds; of more, as many at random


class Difference(NamedTuple):
    """Of two arms, paired by seed: pairs share batches and initial draws, and what a seed does to both cancels.

    Attributes:
        mean: Of values − base.
        half: Half its 95% t-interval.
        p: Two-sided paired t-test; None when all pairs differ by the same amount, because it divides by that spread.
        p_permutation: Two-sided: how often random signs make the mean difference as large. Assumes nothing about
            the spread, and cannot fall below 2/2ⁿ for n seeds.
    """

    mean: float
    half: float
    p: float | None
    p_permutation: float


def paired_difference(values: Sequence[float], base: Sequence[float]) -> Difference | None:
    """Compare two arms.

    Args:
        values: Final bpc by seed.
        base: The baseline's, same seeds in the same order.

    Returns:
        None with fewer than two pairs or a value that is not finite.
    """
    if len(values) < 2 or not np.all(np.isfinite([values, base])):
        return None
    differences = np.subtract(values, base)
    # Signs flipped at random: under no effect either sign was as likely.
    flipped: Any = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=_MOST_RESAMPLES,
        rng=np.random.default_rng(0),
    )
    p_permutation = float(flipped.pvalue)
    # Equal up to rounding: a t statistic would be rounding noise divided by rounding noise.
    if np.ptp(differences) <= 1e-12 * max(np.max(np.abs(values)), np.max(np.abs(base))):
        return Difference(float(differences.mean()), 0.0, None, p_permutation)
    p: Any = stats.ttest_rel(values, base).pvalue
    return Difference(float(differences.mean()), float(half_interval(differences)), float(p), p_permutation)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p values for their number, in their order: any one below 0.05 by chance then has a chance of 5% at most.

    The k-th smallest of n is multiplied by n − k + 1 and is at least as large as the one before.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return corrected.tolist()


class Arrival(NamedTuple):
    """When the runs of an arm come down to a target.

    Attributes:
        reached: How many did.
        steps: Mean optimizer steps; None where some did not arrive.
        steps_half: Half its 95% t-interval over seeds; None also with one seed.
        steps_at_least: Where some did not arrive: the mean with their last step in place of theirs, which the true
            mean exceeds.
        seconds: Mean training seconds; None where some did not arrive.
    """

    reached: int
    steps: float | None = None
    steps_half: float | None = None
    steps_at_least: float | None = None
    seconds: float | None = None


def arrival(runs: Sequence[Run], target: float) -> Arrival:
    """Steps and seconds after which the runs' validations come down to ``target`` bpc, which is taken as exact."""
    found = [first_at_or_below(run, target) for run in runs]
    known = [point for point in found if point is not None]
    if len(known) == len(runs):
        return arrived(known)
    ends = [float(run.metrics["step"][-1]) for run in runs]
    steps = [end if point is None else point[0] for end, point in zip(ends, found, strict=True)]
    return Arrival(len(known), steps_at_least=float(np.mean(steps)))


def arrived(points: Sequence[tuple[float, float]]) -> Arrival:
    """The same for runs of which it is known when, as (steps, seconds), they arrived."""
    if not points:
        return Arrival(0)
    steps, seconds = np.array(points).T
    half = float(half_interval(steps)) if len(points) > 1 else None
    return Arrival(len(points), float(steps.mean()), half, seconds=float(seconds.mean()))


def first_at_or_below(run: Run, bpc: float) -> tuple[float, float] | None:
    """Step and training second at which a run's validation first came down to ``bpc``.

    Between two validations the curve is taken as straight; at the first there is nothing to
    interpolate from, so its own step stands.

    Returns:
        (steps, seconds), or None when no validation was that low.
    """
    step, seconds, values = validations(run)
    below = np.flatnonzero(values <= bpc)
    if below.size == 0:
        return None
    last = below[0]
    if last == 0:
        return float(step[0]), float(seconds[0])
    part = (values[last - 1] - bpc) / (values[last - 1] - values[last])
    between = [float(x[last - 1] + part * (x[last] - x[last - 1])) for x in (step, seconds)]
    return between[0], between[1]


def validations(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, training seconds and bpc of a run's validations."""
    done = np.isfinite(run.metrics["val/bpc"]) & np.isfinite(run.metrics["seconds"])
    return run.metrics["step"][done], run.metrics["seconds"][done], run.metrics["val/bpc"][done]


def smallest_permutation_p(seeds: int) -> float:
    """The least that a paired permutation test of so many seeds can give."""
    return min(1.0, 2 / 2**seeds) if seeds else math.nan
