"""Variance laws of the random maps (C8), each derived from E exp(a·ω) = exp(‖a‖²/2) for ω ~ N(0, I)."""

import math

import pytest
import torch

from linrope import FavorHyperbolic, FavorPlus, FavorPlusPlus, FavorReLU, RandomFourier
from tests.cases import close, randn

D = 16
ROWS = 64  # rows of ω in one estimate
DRAWS = 4_000
SIGMAS = 5


def pair(cosine, length=1.0):
    """Two vectors of this length and this cosine."""
    q = torch.zeros(D, dtype=torch.float64)
    k = q.clone()
    q[0] = length
    k[0], k[1] = length * cosine, length * math.sqrt(1 - cosine**2)
    return q, k


def estimates(kind, q, k, *, orthogonal, rows=ROWS, draws=DRAWS, **options):
    """Independent estimates of the kernel, from ``rows`` rows of ω each, all drawn by one wide map.

    Blocks of D rows are independent of each other, so a wide map is many narrow ones side by side.
    """
    sides = 2 if kind in (FavorHyperbolic, RandomFourier) else 1
    wide = kind(D, sides * rows * draws, orthogonal=orthogonal, seed=1, **options).double()
    terms = (wide.map_query(q) * wide.map_key(k)).reshape(sides, draws, rows).sum(0)
    return terms.sum(-1) * draws


def moments(q, k):
    """‖q̃‖² + ‖k̃‖², ‖q̃ + k̃‖² and ‖q̃ - k̃‖²."""
    q, k = q / D**0.25, k / D**0.25
    return (q @ q + k @ k).item(), (q + k).square().sum().item(), (q - k).square().sum().item()


def variance_of_plus(q, k):
    """One row: exp(ω·(q̃+k̃) - (‖q̃‖² + ‖k̃‖²)/2). Choromanski et al. 2021, lemma 2."""
    squares, s, _ = moments(q, k)
    return math.exp(-squares) * (math.exp(2 * s) - math.exp(s))


def variance_of_hyperbolic(q, k):
    """One row: the same with cosh; its square is (1 + cosh(2·))/2."""
    squares, s, _ = moments(q, k)
    return math.exp(-squares) * (math.exp(s) - 1) ** 2 / 2


def variance_of_fourier(q, k):
    """One row: exp((‖q̃‖² + ‖k̃‖²)/2) cos(ω·(q̃-k̃)); its square is (1 + cos(2·))/2."""
    squares, _, s = moments(q, k)
    return math.exp(squares) * (1 - math.exp(-s)) ** 2 / 2


def variance_of_plus_plus(q, k, at):
    """One row: (1-4A)^(d/2) exp(2A‖ω‖² + √(1-4A) ω·(q̃+k̃) - …), from E exp(a‖ω‖² + b·ω), a Gaussian integral."""
    squares, s, _ = moments(q, k)
    second = (1 - 4 * at) ** D * (1 - 8 * at) ** (-D / 2) * math.exp(2 * (1 - 4 * at) / (1 - 8 * at) * s - squares)
    return second - math.exp(s - squares)


LAWS = {
    FavorPlus: variance_of_plus,
    FavorHyperbolic: variance_of_hyperbolic,
    RandomFourier: variance_of_fourier,
    FavorPlusPlus: lambda q, k: variance_of_plus_plus(q, k, FavorPlusPlus(D, 2).damping),
}
every_law = pytest.mark.parametrize("kind", LAWS)


@every_law
@pytest.mark.parametrize("cosine", [-0.5, 0.0, 0.9])
def test_the_error_of_independent_rows_is_the_formula(kind, cosine):
    q, k = pair(cosine)
    squares = (estimates(kind, q, k, orthogonal=False) - math.exp(cosine / math.sqrt(D))).square()
    expected = LAWS[kind](q, k) / ROWS
    error = (squares.std() / math.sqrt(DRAWS)).item()
    assert abs(squares.mean().item() - expected) < SIGMAS * error
    assert error < 0.05 * expected


@pytest.mark.parametrize("kind", [*LAWS, FavorReLU])
@pytest.mark.parametrize(("cosine", "length"), [(-0.5, 2.0), (0.5, 1.0)])
def test_orthogonal_rows_beat_independent_ones(kind, cosine, length):
    """With as many rows as a block holds; by more than five standard errors of the difference."""
    q, k = pair(cosine, length)
    options = {"square": moments(q, k)[1]} if kind is FavorPlusPlus else {}
    found = [estimates(kind, q, k, orthogonal=o, rows=D, draws=16_000, **options) for o in (True, False)]
    errors = [(x - x.mean()).square() for x in found]  # the mean is tested elsewhere
    deviation = math.hypot(*(error.std().item() / math.sqrt(16_000) for error in errors))
    assert errors[0].mean() + SIGMAS * deviation < errors[1].mean()


@pytest.mark.parametrize("kind", [*LAWS, FavorReLU])
def test_the_error_falls_as_the_root_of_the_rows(kind):
    q, k = pair(0.5)
    few, many = (estimates(kind, q, k, orthogonal=False, rows=rows).std() for rows in (64, 256))
    assert abs(many / few - 0.5) < 0.1


def test_the_order_of_the_laws():
    """With as many features: cosh below exp, a damped map below both where it is tuned, waves worst at small kernels."""
    for cosine in (-0.5, 0.0, 0.5, 0.9):
        q, k = pair(cosine)
        # Two features a row for the two-sided maps.
        assert 2 * variance_of_hyperbolic(q, k) < variance_of_plus(q, k)
    q, k = pair(0.9, length=3.0)
    tuned = FavorPlusPlus(D, 2, square=moments(q, k)[1]).damping
    assert variance_of_plus_plus(q, k, tuned) < 2 * variance_of_hyperbolic(q, k) < variance_of_plus(q, k)
    q, k = pair(-0.9, length=3.0)
    assert variance_of_fourier(q, k) > variance_of_plus(q, k)


@pytest.mark.parametrize("square", [0.5, 2.0, 8.0])
def test_the_damping_is_where_the_variance_is_least(square):
    """A from the paper's formula against a search over A, and far below A = 0, which is FAVOR+."""
    length = math.sqrt(square / 4 * math.sqrt(D))  # q = k, so ‖q̃+k̃‖² = 4‖q̃‖²
    q, k = pair(1.0, length)
    assert math.isclose(moments(q, k)[1], square)
    best = FavorPlusPlus(D, 2, square=square).damping
    found = min((variance_of_plus_plus(q, k, -a / 10_000), -a / 10_000) for a in range(5_000))[1]
    assert abs(best - found) < 1e-4
    assert math.isclose(variance_of_plus_plus(q, k, 0.0), variance_of_plus(q, k))
    assert variance_of_plus_plus(q, k, best) < 0.95 * variance_of_plus(q, k)


@pytest.mark.slow
@pytest.mark.parametrize("orthogonal", [True, False])
def test_the_damped_map_beats_the_plain_one_where_it_is_tuned(orthogonal):
    q, k = pair(0.8, length=1.1)
    options = {"orthogonal": orthogonal, "rows": D, "draws": 64_000}
    kernel = math.exp(0.8 * 1.1**2 / math.sqrt(D))
    plain = (estimates(FavorPlus, q, k, **options) - kernel).square()
    damped = (estimates(FavorPlusPlus, q, k, square=moments(q, k)[1], **options) - kernel).square()
    deviation = math.hypot(*(error.std().item() / math.sqrt(64_000) for error in (plain, damped)))
    assert damped.mean() + SIGMAS * deviation < plain.mean()


@pytest.mark.parametrize("kind", [*LAWS, FavorReLU])
def test_queries_and_keys_share_one_matrix(kind):
    feature_map, x = kind(D), randn(50, D)
    assert torch.equal(feature_map.map_query(x), feature_map.map_key(x))
    assert list(feature_map.state_dict()) == ["projection.rows"]


@pytest.mark.parametrize("kind", [FavorHyperbolic, RandomFourier])
def test_two_sided_maps_need_an_even_width(kind):
    assert kind(D, 6).projection.rows.shape == (3, D)
    with pytest.raises(ValueError, match="num_features must be even, two for each row, got 7"):
        kind(D, 7)


def test_the_halves_of_a_two_sided_map_are_each_others_inverse():
    """exp(u) and exp(-u) stand half the width apart: half-split pairing turns them together."""
    feature_map, x = FavorHyperbolic(D, 10).double(), randn(20, D)
    features = feature_map.map_key(x)
    half_square = x.square().sum(-1, keepdim=True) / (2 * math.sqrt(D))
    close(features[:, :5] * features[:, 5:], (-2 * half_square).exp().expand(-1, 5) / 10, 1e-12)


@pytest.mark.parametrize("kind", [*LAWS, FavorReLU])
def test_every_random_map_is_redrawn_by_step_and_layer(kind):
    feature_map = kind(4, redraw_interval=3, seed=5)
    first = feature_map.projection.rows.clone()
    for step, due in ((1, False), (2, False), (3, True), (4, False)):
        before = feature_map.projection.rows.clone()
        feature_map.redraw(step, 1)
        assert torch.equal(feature_map.projection.rows, before) is not due
    feature_map.redraw(0, 0)
    assert torch.equal(feature_map.projection.rows, first)


@pytest.mark.parametrize("square", [1e-12, 1e-3, 1e3, 1e8])
def test_the_damping_is_the_papers_formula_at_any_size(square):
    """At the ends: ρ → 1 - 4s/d for small s, ρ → d/2s for large s; A = (1 - 1/ρ)/8."""
    damping = FavorPlusPlus(D, 2, square=square).damping
    rho = 1 / (1 - 8 * damping)
    assert damping <= 0
    if square < 1:
        assert math.isclose(rho, 1 - 4 * square / D, rel_tol=1e-6)
    else:
        assert math.isclose(rho, D / (2 * square), rel_tol=2 * D / square)


@pytest.mark.parametrize("square", [0.0, -1.0, math.inf, math.nan])
def test_a_square_that_is_none_is_refused(square):
    with pytest.raises(ValueError, match="square must be above 0"):
        FavorPlusPlus(4, square=square)
