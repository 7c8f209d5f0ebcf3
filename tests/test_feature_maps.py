import math
from functools import partial

import pytest
import torch
from torch import nn

from linrope import EluPlusOne, FavorPlus, FeatureMap, redraw_feature_maps
from tests.cases import EXPORTED, MAPS, close, make_map, randn

every_map = pytest.mark.parametrize("name", MAPS)

# The kernel each exported map promises, as a function of raw q and k; None where it is learned.
KERNELS = {
    "EluPlusOne": lambda q, k: ((nn.functional.elu(q) + 1) * (nn.functional.elu(k) + 1)).sum(-1),
    "FavorPlus": lambda q, k: ((q * k).sum(-1) / math.sqrt(q.shape[-1])).exp(),
}


def test_every_exported_map_has_its_kernel_here():
    assert EXPORTED.keys() == KERNELS.keys()


@every_map
@pytest.mark.parametrize("head_dim", [1, 2, 3, 4, 8, 17, 64])
def test_num_features_is_the_last_dimension(name, head_dim):
    feature_map = make_map(name, head_dim)
    assert feature_map.head_dim == head_dim
    x = randn(2, 3, 5, head_dim)
    features, log_scale = feature_map.scaled_key(x)
    for mapped in (feature_map.map_query(x), feature_map.map_key(x), feature_map.scaled_query(x), features):
        assert mapped.shape == (2, 3, 5, feature_map.num_features)
    assert log_scale is None or log_scale.shape == (2, 3, 5)


@every_map
@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
def test_a_map_that_says_positive_is(name, scale):
    feature_map = make_map(name, 8)
    x = scale * randn(200, 8)
    signs = torch.cat([f(x).flatten() for f in (feature_map.map_query, feature_map.map_key)]).sign()
    if feature_map.is_positive:
        assert (signs > 0).all()
    else:
        assert (signs <= 0).any(), "is_positive is False, yet nothing is negative"


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel is not None])
def test_products_are_the_kernel(name):
    q, k = randn(50, 8) / 2, randn(50, 8) / 2
    expected = KERNELS[name](q, k)
    if name != "FavorPlus":
        feature_map = make_map(name, 8)
        return close((feature_map.map_query(q) * feature_map.map_key(k)).sum(-1), expected, 1e-12)
    terms = []
    for seed in range(400):
        feature_map = FavorPlus(8, num_features=64, seed=seed).double()
        terms.append((feature_map.map_query(q) * feature_map.map_key(k)).sum(-1))
    draws = torch.stack(terms)
    error = (draws.mean(0) - expected) / (draws.std(0) / math.sqrt(len(draws)))
    assert error.abs().max() < 5


@every_map
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaled_features_are_the_features_up_to_what_attention_divides_out(name, dtype):
    feature_map = make_map(name, 8, dtype)
    x = randn(2, 30, 8, dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    query_ratio = feature_map.scaled_query(x) / feature_map.map_query(x)
    assert (query_ratio > 0).all()
    close(query_ratio, query_ratio[..., :1].expand_as(query_ratio), tolerance)  # one factor a query
    features, log_scale = feature_map.scaled_key(x)
    log_scale = torch.zeros(2, 30, dtype=dtype) if log_scale is None else log_scale
    key_ratio = features * log_scale[..., None].exp() / feature_map.map_key(x)
    close(key_ratio, key_ratio[:1, :1, :1].expand_as(key_ratio), tolerance)  # one factor for all keys
    assert key_ratio[0, 0, 0] > 0


@every_map
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_scaled_features_neither_overflow_nor_vanish(name, scale):
    feature_map = make_map(name, 16, torch.float32)
    x = scale * randn(500, 16, dtype=torch.float32)
    features, log_scale = feature_map.scaled_key(x)
    for mapped in (feature_map.scaled_query(x), features):
        largest = mapped.abs().amax(-1)
        # Two features multiply and thousands of products add up, in float32.
        assert (largest < 1e15).all()
        assert (largest > 1e-15).all()
    assert log_scale is None or log_scale.isfinite().all()


@every_map
def test_gradients_are_those_of_the_formula(name):
    feature_map = make_map(name, 4)
    x = randn(3, 4, grad=True)
    assert torch.autograd.gradcheck(feature_map.map_query, x)
    assert torch.autograd.gradcheck(feature_map.map_key, x)


@every_map
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_features_of_half_precision_are_float32_or_wider(name, low):
    feature_map = make_map(name, 8, torch.float32)
    x = randn(2, 5, 8, dtype=low)
    features, log_scale = feature_map.scaled_key(x)
    for mapped, wide in (
        (feature_map.map_query(x), feature_map.map_query(x.float())),
        (feature_map.map_key(x), feature_map.map_key(x.float())),
        (feature_map.scaled_query(x), feature_map.scaled_query(x.float())),
        (features, feature_map.scaled_key(x.float())[0]),
    ):
        assert mapped.dtype == wide.dtype
        assert torch.finfo(mapped.dtype).bits >= 32
        close(mapped, wide, 1e-6)
    assert log_scale is None or torch.finfo(log_scale.dtype).bits >= 32


@every_map
def test_autocast_does_not_reach_the_features(name):
    feature_map, x = make_map(name, 8, torch.float32), randn(5, 8, dtype=torch.float32)
    plain = feature_map.map_key(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(feature_map.map_key(x), plain)


@every_map
def test_each_vector_is_mapped_alone(name):
    feature_map, x = make_map(name, 8), randn(2, 3, 5, 8)
    loud = 100 * x
    loud[1, 2, 3] = x[1, 2, 3]
    for method in ("map_query", "map_key", "scaled_query"):
        mapped = getattr(feature_map, method)
        close(mapped(loud)[1, 2, 3], mapped(x[1, 2, 3]), 1e-13)
    features, log_scale = feature_map.scaled_key(loud)
    alone, alone_log_scale = feature_map.scaled_key(x[1, 2, 3])
    close(features[1, 2, 3], alone, 1e-13)
    if log_scale is not None:
        close(log_scale[1, 2, 3], alone_log_scale, 1e-13)


@every_map
def test_mapping_draws_nothing(name):
    feature_map, x = make_map(name, 8).train(), randn(5, 8)
    before = torch.get_rng_state()
    first = feature_map.map_key(x)
    assert torch.equal(feature_map.map_key(x), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elu_plus_one_is_exact_over_its_whole_range(dtype):
    x = torch.tensor([-100.0, -20.0, -17.5, -1.0, -1e-3, 0.0, 1e-3, 1.0, 90.0], dtype=dtype, requires_grad=True)
    y = EluPlusOne(9).map_key(x)
    exact = [math.exp(v) if v <= 0 else v + 1 for v in x.tolist()]
    eps = torch.finfo(dtype).eps
    for got, expected in zip(y.tolist(), exact, strict=True):
        assert got > 0
        assert math.isclose(got, expected, rel_tol=4 * eps, abs_tol=1e-44)
    (grad,) = torch.autograd.grad(y.sum(), x)
    for got, at in zip(grad.tolist(), x.tolist(), strict=True):
        assert math.isclose(got, math.exp(min(at, 0.0)), rel_tol=4 * eps, abs_tol=1e-44)


@pytest.mark.parametrize("x", [90.0, 1e4, 6e4])
def test_the_gradient_of_elu_plus_one_is_one_far_above_zero(x):
    x = torch.tensor([x], requires_grad=True)
    (grad,) = torch.autograd.grad(EluPlusOne(1).map_query(x), x)
    assert grad.item() == 1


def test_the_contract_class_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        FeatureMap()


class Plain(FeatureMap):
    """The least that a user's map must define."""

    is_positive = False

    def __init__(self, head_dim):
        super().__init__()
        self.head_dim = self.num_features = head_dim
        self.redraws = []

    def map_query(self, query):
        return query + 1

    def map_key(self, key):
        return 2 * key

    def redraw(self, step, layer):
        self.redraws.append((step, layer))


def test_a_map_of_two_methods_scales_by_nothing():
    x = randn(3, 4)
    assert torch.equal(Plain(4).scaled_query(x), x + 1)
    features, log_scale = Plain(4).scaled_key(x)
    assert torch.equal(features, 2 * x)
    assert log_scale is None


def test_redraw_tells_every_map_its_layer():
    model = nn.Sequential(Plain(2), nn.Linear(2, 2), nn.Sequential(Plain(2)), EluPlusOne(2))
    redraw_feature_maps(model, 5)
    assert model[0].redraws == [(5, 0)]
    assert model[2][0].redraws == [(5, 1)]


def test_factories_take_the_head_dim_alone():
    assert partial(FavorPlus, num_features=6)(4).num_features == 6
    for factory in EXPORTED.values():
        assert factory(4).head_dim == 4
