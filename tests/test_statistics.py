"""The statistics of a comparison, against scipy, enumeration, and simulated runs whose effects are known."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from scipy import stats

from plots.runs import read_run
from tasks.compare.statistics import arrival, first_at_or_below, holm, paired_difference, smallest_permutation_p
from tests.synthetic import make_run


def simulated(effect, seeds, arms=1, number=0):
    """Final bpc of a baseline and of arms that differ from it by ``effect``; what a seed does, it does to all."""
    chance = np.random.default_rng((number, seeds))
    base = 3 + chance.normal(0, 0.1, seeds)
    return base, base + effect + chance.normal(0, 0.02, (arms, seeds))


@pytest.mark.parametrize("seeds", [2, 3, 8])
@pytest.mark.parametrize("effect", [-0.1, 0.0])
def test_the_t_test_is_scipys(seeds, effect):
    base, (arm,) = simulated(effect, seeds)
    result = paired_difference(arm, base)
    expected = stats.ttest_rel(arm, base)
    interval = expected.confidence_interval(0.95)
    assert result.p == pytest.approx(expected.pvalue)
    assert result.mean - result.half == pytest.approx(interval.low)
    assert result.mean + result.half == pytest.approx(interval.high)


@pytest.mark.parametrize("seeds", [2, 3, 5, 8])
@pytest.mark.parametrize("effect", [-0.1, -0.01, 0.0])
def test_the_permutation_test_counts_sign_flips(seeds, effect):
    """By enumeration: the share of all 2ⁿ choices of signs whose mean is as far from 0."""
    base, (arm,) = simulated(effect, seeds, number=1)
    differences = arm - base
    flips = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=seeds)]
    expected = np.mean(np.array(flips) >= abs(differences.sum()) * (1 - 1e-12))
    assert paired_difference(arm, base).p_permutation == pytest.approx(expected)


def test_a_clear_effect_gets_the_least_permutation_p_there_is():
    for seeds in (2, 3, 6):
        base, (arm,) = simulated(-1.0, seeds)
        assert paired_difference(arm, base).p_permutation == smallest_permutation_p(seeds) == 2 / 2**seeds
    assert smallest_permutation_p(5) > 0.05 > smallest_permutation_p(6)


def test_many_seeds_are_sampled_not_enumerated_and_always_alike():
    base, (arm,) = simulated(-0.004, 40, number=3)
    first, second = (paired_difference(arm, base).p_permutation for _ in range(2))
    assert first == second
    assert first == pytest.approx(stats.ttest_rel(arm, base).pvalue, abs=0.02)


def test_intervals_cover_the_true_effect_as_often_as_they_say():
    """Of 1,000 simulated comparisons about 950; 4 standard errors of that count are 28."""
    covered = 0
    for number in range(1000):
        base, (arm,) = simulated(-0.05, 4, number=number)
        result = paired_difference(arm, base)
        covered += abs(result.mean + 0.05) <= result.half
    assert covered == pytest.approx(950, abs=28)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.04], [0.04]),
        ([0.5, 0.9], [1.0, 1.0]),
        ([0.02, 0.02], [0.04, 0.04]),
        ([], []),
    ],
)
def test_holm_by_hand(given, expected):
    assert holm(given) == pytest.approx(expected)


def test_holm_rejects_what_the_sequential_procedure_rejects():
    """Holm's own words: go up from the smallest p while p ≤ 0.05 / (number of those left)."""
    chance = np.random.default_rng(0)
    for _ in range(200):
        p = chance.uniform(0, 0.08, 5)
        rejected = set()
        for place, index in enumerate(np.argsort(p)):
            if p[index] > 0.05 / (5 - place):
                break
            rejected.add(index)
        assert {i for i, value in enumerate(holm(p)) if value <= 0.05} == rejected


@pytest.mark.slow
def test_without_effects_holm_seldom_finds_one_where_plain_p_values_often_do():
    """10 arms, 5 seeds, no effect, 400 times: some arm below 0.05 in at most 5% of them, by plain p in many."""
    corrected = plain = 0
    for number in range(400):
        base, arms = simulated(0.0, 5, arms=10, number=number)
        p = [paired_difference(arm, base).p for arm in arms]
        corrected += min(holm(p)) < 0.05
        plain += min(p) < 0.05
    assert corrected <= 400 * 0.05 + 4 * np.sqrt(400 * 0.05 * 0.95)
    assert plain > 400 * 0.25


@pytest.mark.parametrize("shift", [0.0, -0.1])
def test_identical_differences_neither_crash_nor_warn_nor_give_a_t_test(shift):
    base = [3.0, 3.2, 3.1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = paired_difference([value + shift for value in base], base)
    assert result.mean == pytest.approx(shift)
    assert (result.half, result.p) == (0.0, None)
    assert result.p_permutation == (1.0 if shift == 0 else 0.25)


@pytest.mark.parametrize("values", [[3.0], [3.0, float("nan")], [float("inf"), 3.0]])
def test_one_pair_or_a_diverged_one_gives_no_difference(values):
    assert paired_difference(values, [3.0] * len(values)) is None


# --- arrival at a target


def test_arrival_is_interpolated_between_two_validations(tmp_path):
    run = read_run(make_run(tmp_path / "a", [(10, 5.0), (20, 4.0), (30, 3.0), (40, 2.0)], seconds_per_step=2.0))
    assert first_at_or_below(run, 3.25) == pytest.approx((27.5, 55.0))
    assert first_at_or_below(run, 3.0) == pytest.approx((30, 60))
    assert first_at_or_below(run, 6.0) == pytest.approx((10, 20))
    assert first_at_or_below(run, 1.9) is None


def test_the_first_arrival_counts_even_if_the_curve_rises_again(tmp_path):
    run = read_run(make_run(tmp_path / "a", [(10, 5.0), (20, 3.0), (30, 4.0), (40, 2.0)]))
    assert first_at_or_below(run, 3.5) == pytest.approx((17.5, 8.75))


def test_arrivals_have_the_textbook_interval(tmp_path):
    """Straight curves from 5 at step 0+ to known ends: each arrives where it must, the interval is the t-interval."""
    ends = [2.0, 2.5, 1.0]
    runs = [read_run(make_run(tmp_path / f"{i}", [(10, 5.0), (50, end)])) for i, end in enumerate(ends)]
    steps = np.array([10 + 40 * (5 - 3) / (5 - end) for end in ends])
    result = arrival(runs, 3.0)
    interval = stats.t.interval(0.95, 2, steps.mean(), stats.sem(steps))
    assert (result.reached, result.steps_at_least) == (3, None)
    assert result.steps == pytest.approx(steps.mean())
    assert result.steps - result.steps_half == pytest.approx(interval[0])
    assert result.seconds == pytest.approx(steps.mean() * 0.5)
    single = arrival(runs[:1], 3.0)
    assert (single.steps, single.steps_half) == (pytest.approx(steps[0]), None)


def test_a_run_that_does_not_arrive_bounds_the_mean_from_below(tmp_path):
    runs = [read_run(make_run(tmp_path / f"{i}", [(10, 5.0), (50, end)])) for i, end in enumerate([1.0, 4.0])]
    result = arrival(runs, 3.0)
    assert (result.reached, result.steps, result.steps_half, result.seconds) == (1, None, None, None)
    assert result.steps_at_least == pytest.approx((30 + 50) / 2)
