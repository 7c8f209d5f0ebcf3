import hashlib
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from scipy.stats import kstest
from torch.nn import functional

from linrope import ByteTransformer, FavorPlus, LinearAttention, redraw_feature_maps
from tests.cases import close, randn

D = 16
DRAWS = 4000
ROOT = Path(__file__).parents[1]
SIGMAS = 4


def unit_vectors(cosine: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of length 1 with the given cosine."""
    q, other = torch.linalg.qr(randn(D, 2))[0].T
    return q, cosine * q + math.sqrt(1 - cosine**2) * other


def estimates(q, k, num_features, *, orthogonal, draws=DRAWS):
    """Independent estimates of the kernel, ``num_features`` each, all drawn by one wide map.

    Blocks of D rows are independent of each other, so a wide map is many narrow ones side by side.
    """
    assert num_features % D == 0
    wide = FavorPlus(D, num_features * draws, orthogonal=orthogonal, seed=1).double()
    terms = wide.map_query(q) * wide.map_key(k) * wide.num_features
    return terms.reshape(draws, num_features).mean(-1)


def mean_and_error(x):
    return x.mean().item(), (x.std() / math.sqrt(len(x))).item()


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("cosine", [-1.0, 0.0, 0.7, 1.0])
def test_the_mean_is_the_softmax_kernel(orthogonal, cosine):
    q, k = unit_vectors(cosine)
    mean, error = mean_and_error(estimates(q, k, 64, orthogonal=orthogonal))
    expected = math.exp((q @ k).item() / math.sqrt(D))
    assert abs(mean - expected) < SIGMAS * error + 1e-12
    assert cosine == -1.0 or 0 < error < 0.02 * expected


@pytest.mark.parametrize("orthogonal", [True, False])
def test_the_mean_over_seeds_is_the_softmax_kernel(orthogonal):
    q, k = unit_vectors(0.3)
    maps = (FavorPlus(D, 32, orthogonal=orthogonal, seed=seed).double() for seed in range(500))
    mean, error = mean_and_error(torch.stack([m.map_query(q) @ m.map_key(k) for m in maps]))
    assert abs(mean - math.exp(0.3 / math.sqrt(D))) < SIGMAS * error


@pytest.mark.parametrize("orthogonal", [True, False])
def test_the_error_falls_as_the_root_of_the_features(orthogonal):
    q, k = unit_vectors(0.5)
    expected = math.exp(0.5 / math.sqrt(D))
    few, many = ((estimates(q, k, m, orthogonal=orthogonal) - expected).square().mean().sqrt() for m in (64, 256))
    assert abs(many / few - 0.5) < 0.1


@pytest.mark.parametrize("cosine", [-0.5, 0.0, 0.9])
def test_the_error_of_independent_rows_is_the_formula(cosine):
    q, k = unit_vectors(cosine)
    kernel = math.exp(cosine / math.sqrt(D))
    squares = (estimates(q, k, 64, orthogonal=False) - kernel).square()
    length = ((q + k) / D**0.25).square().sum().item()
    # Choromanski et al. 2021, lemma 2.
    expected = math.exp(length) * kernel**2 * (1 - math.exp(-length)) / 64
    mean, error = mean_and_error(squares)
    assert abs(mean - expected) < SIGMAS * error
    assert error < 0.05 * expected


def test_orthogonal_rows_beat_independent_ones():
    q, k = unit_vectors(0.5)
    kernel = math.exp(0.5 / math.sqrt(D))
    (a, da), (b, db) = (
        mean_and_error((estimates(q, k, D, orthogonal=o, draws=16_000) - kernel).square()) for o in (True, False)
    )
    assert a + SIGMAS * math.hypot(da, db) < b


@pytest.mark.parametrize("num_features", [5, 16, 40])
def test_rows_of_a_block_are_orthogonal(num_features):
    rows = FavorPlus(D, num_features).projection.rows.double()
    for block in functional.normalize(rows, dim=-1).split(D):
        close(block @ block.T, torch.eye(len(block), dtype=torch.float64), 1e-6)


def test_rows_of_different_blocks_are_independent():
    rows = functional.normalize(FavorPlus(D, 2000 * D).projection.rows.double(), dim=-1).reshape(2000, D, D)
    cosine = (rows[0::2] * rows[1::2]).sum(-1)
    # The cosine of two random directions has mean 0 and variance 1/d.
    assert abs(cosine.mean()) < SIGMAS / math.sqrt(D * cosine.numel())
    assert abs(cosine.square().mean() * D - 1) < SIGMAS * math.sqrt(2 / cosine.numel())


@pytest.mark.parametrize("orthogonal", [True, False])
def test_lengths_of_rows_are_those_of_gaussian_vectors(orthogonal):
    lengths = FavorPlus(D, 4000, orthogonal=orthogonal).projection.rows.double().norm(dim=-1)
    assert kstest(lengths.numpy(), "chi", args=(D,)).pvalue > 1e-3


@pytest.mark.parametrize("orthogonal", [True, False])
def test_directions_are_uniform(orthogonal):
    # A QR decomposition whose signs are left as they come makes diagonal entries of one sign.
    blocks = 2000
    rows = functional.normalize(FavorPlus(D, blocks * D, orthogonal=orthogonal).projection.rows.double(), dim=-1)
    mean = rows.reshape(blocks, D, D).mean(0)
    assert mean.abs().max() < 5 / math.sqrt(D * blocks)
    # Each coordinate squared has mean 1/d and variance 2(d-1)/(d²(d+2)).
    square = rows.reshape(blocks, D, D).square().mean(0)
    deviation = math.sqrt(2 * (D - 1) / (D**2 * (D + 2)) / blocks)
    assert (square - 1 / D).abs().max() < 5 * deviation


def test_queries_and_keys_share_one_matrix():
    feature_map, x = FavorPlus(D), randn(50, D)
    assert torch.equal(feature_map.map_query(x), feature_map.map_key(x))
    assert list(feature_map.state_dict()) == ["projection.rows"]


@pytest.mark.parametrize("num_features", [None, 1, 7, 48])
def test_features_are_the_formula(num_features):
    feature_map, x = FavorPlus(D, num_features).double(), randn(20, D)
    scaled = x / D**0.25
    expected = torch.stack(
        [(scaled @ row - scaled.square().sum(-1) / 2).exp() for row in feature_map.projection.rows], dim=-1
    ) / math.sqrt(feature_map.num_features)
    close(feature_map.map_key(x), expected, 1e-12)


@pytest.mark.parametrize("head_dim", [2, 8, 16, 64])
def test_the_default_width_is_d_ln_d_made_even(head_dim):
    m = FavorPlus(head_dim).num_features
    assert m % 2 == 0
    assert 0 <= m - int(head_dim * math.log(head_dim)) <= 1


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_scaled_keys_are_exact_where_the_formula_underflows(scale):
    feature_map, x = FavorPlus(D).double(), scale * randn(200, D)
    scaled = x / D**0.25
    exponents = scaled @ feature_map.projection.rows.T - scaled.square().sum(-1, keepdim=True) / 2
    features, log_scale = feature_map.scaled_key(x)
    lack = exponents - features.log() - log_scale[:, None]
    # One constant for all keys and features, and the same one in a call with other keys: a maximum taken
    # over the keys of a call would change it.
    assert (lack - lack[0, 0]).abs().max() < 1e-9
    other, other_scale = feature_map.scaled_key(x[:1] / 100)
    exponent = (scaled[0] / 100) @ feature_map.projection.rows.T - (scaled[0] / 100).square().sum() / 2
    assert (exponent - other[0].log() - other_scale - lack[0, 0]).abs().max() < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("orthogonal", [True, False])
def test_construction_under_another_default_dtype(dtype, orthogonal):
    expected = FavorPlus(D, orthogonal=orthogonal).projection.rows
    torch.set_default_dtype(dtype)
    try:
        projection = FavorPlus(D, orthogonal=orthogonal).projection.rows
    finally:
        torch.set_default_dtype(torch.float32)
    assert projection.dtype == torch.float32
    assert torch.equal(projection, expected)


@pytest.mark.parametrize("settings", [{"head_dim": 0}, {"num_features": 0}, {"redraw_interval": 0}])
def test_sizes_below_one_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        FavorPlus(**{"head_dim": 4, **settings})


# The life of the projection (C9).


def favor_model(**settings):
    attention = partial(LinearAttention, num_heads=2, feature_map=partial(FavorPlus, **settings))
    return ByteTransformer(num_layers=2, d_model=8, attention=attention)


def projections(model):
    return [block.attention.feature_map.projection.rows.clone() for block in model.blocks]


def test_a_projection_is_a_buffer_from_construction_on():
    feature_map = FavorPlus(4)
    assert [name for name, _ in feature_map.named_buffers()] == ["projection.rows"]
    assert not list(feature_map.parameters())


def test_a_projection_is_a_function_of_seed_step_and_layer():
    def drawn(seed, step, layer):
        feature_map = FavorPlus(4, seed=seed, redraw_interval=1)
        feature_map.redraw(step, layer)
        return feature_map.projection.rows

    cases = [(seed, step, layer) for seed in (0, 1, 11) for step in (0, 1, 11) for layer in (0, 1, 11)]
    first = {case: drawn(*case) for case in cases}
    torch.manual_seed(123)
    for i, case in enumerate(cases):
        assert torch.equal(drawn(*case), first[case])
        for other in cases[:i]:
            assert not torch.equal(first[case], first[other]), (case, other)


def test_a_redraw_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    FavorPlus(4).redraw(1000, 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("interval", [1, 3, 7, None])
def test_a_redraw_happens_at_multiples_of_the_interval_alone(interval):
    feature_map = FavorPlus(4, redraw_interval=interval)
    for step in range(1, 22):
        before = feature_map.projection.rows.clone()
        feature_map.redraw(step, 0)
        due = interval is not None and step % interval == 0
        assert torch.equal(feature_map.projection.rows, before) is not due


def test_the_first_draw_needs_no_interval():
    assert torch.equal(
        FavorPlus(4, redraw_interval=None).projection.rows, FavorPlus(4, redraw_interval=3).projection.rows
    )


def test_a_redraw_keeps_dtype_and_storage():
    feature_map = FavorPlus(4, redraw_interval=1).double()
    storage = feature_map.projection.rows.data_ptr()
    feature_map.redraw(1, 0)
    assert feature_map.projection.rows.data_ptr() == storage
    assert feature_map.projection.rows.dtype == torch.float64


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_draws_nothing(training):
    model, tokens = favor_model(redraw_interval=1).train(training), torch.randint(256, (2, 9))
    before, rng = projections(model), torch.get_rng_state()
    outputs = [model(tokens) for _ in range(3)]
    model.stream(tokens)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert all(map(torch.equal, projections(model), before))
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_strict_load_before_any_forward_gives_equal_outputs():
    model, tokens = favor_model(seed=3), torch.randint(256, (2, 9))
    redraw_feature_maps(model, 5000)
    other = favor_model(seed=4)
    assert not torch.equal(other(tokens), model(tokens))
    other = favor_model(seed=4)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(tokens), model(tokens))


def train(model, optimizer, steps):
    for step in steps:
        tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        redraw_feature_maps(model, step + 1)


@pytest.mark.parametrize("stop", [5, 6, 7, 8])
def test_ten_steps_are_some_and_the_rest_across_a_redraw(stop):
    def start(seed):
        torch.manual_seed(seed)
        model = favor_model(redraw_interval=7)
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    straight, optimizer = start(0)
    first = projections(straight)
    train(straight, optimizer, range(10))
    assert not any(map(torch.equal, projections(straight), first))

    begun, optimizer = start(0)
    train(begun, optimizer, range(stop))
    saved = {"model": begun.state_dict(), "optimizer": optimizer.state_dict()}
    resumed, optimizer = start(99)
    resumed.load_state_dict(saved["model"], strict=True)
    optimizer.load_state_dict(saved["optimizer"])
    train(resumed, optimizer, range(stop, 10))
    for name, tensor in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_another_process_draws_the_same_matrix():
    script = """
import hashlib, random, torch
torch.manual_seed(987)
random.seed(987)
torch.randn(1000)
from linrope import FavorPlus
feature_map = FavorPlus(8, seed=5)
feature_map.redraw(2000, 3)
print(hashlib.sha256(feature_map.projection.rows.numpy().tobytes()).hexdigest())
"""
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    feature_map = FavorPlus(8, seed=5)
    feature_map.redraw(2000, 3)
    assert run.stdout.strip() == hashlib.sha256(feature_map.projection.rows.numpy().tobytes()).hexdigest()
