import math
from functools import partial

import pytest
import torch
from torch import nn

from linrope import (
    DPFP,
    T2R,
    CosFormer,
    EluPlusOne,
    FavorPlus,
    FavorReLU,
    FeatureMap,
    LinearAttention,
    OnePlusCosine,
    ReLU,
    Rotary,
    SquaredReLU,
    redraw_feature_maps,
)
from tests.cases import EXPORTED, MAPS, close, make_map, randn

every_map = pytest.mark.parametrize("name", MAPS)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def dot(x, y):
    return (x * y).sum(-1)


def softmax_kernel(_, q, k):
    return (dot(q, k) / math.sqrt(q.shape[-1])).exp()


def both(function):
    """φ acts on each coordinate alone."""
    return lambda _, q, k: dot(function(q), function(k))


def arc_cosine(feature_map, q, k):
    """E (relu(ω·q) + ε)(relu(ω·k) + ε) for ω ~ N(0, I): Cho and Saul 2009, eq. 6, and the mean of a half-normal."""
    floor = feature_map.floor
    cosine = dot(unit(q), unit(k)).clamp(-1, 1)
    angle = cosine.acos()
    lengths = q.norm(dim=-1), k.norm(dim=-1)
    kernel = lengths[0] * lengths[1] * (angle.sin() + (math.pi - angle) * cosine) / (2 * math.pi)
    return kernel + floor * (lengths[0] + lengths[1]) / math.sqrt(2 * math.pi) + floor**2


def dpfp(_, q, k):
    """Each product of neighbours on the circle of 2d rectified coordinates."""

    def products(x):
        r = torch.cat((x, -x), -1).clamp(min=0)
        width = r.shape[-1]
        return torch.stack([r[..., i] * r[..., (i - 1) % width] for i in range(width)], -1)

    return dot(products(q), products(k))


def cos_former(feature_map, q, k):
    """relu(q)·relu(k), for row i of q and row i of k at the same position; see also the test of its distances."""
    return dot(q.relu(), k.relu())


def taylor(_, q, k):
    u = dot(q, k) / math.sqrt(q.shape[-1])
    return 1 + u + u**2 / 2


def t2r(feature_map, q, k):
    return dot(*((x @ feature_map.weight.T + feature_map.bias).clamp(min=0) for x in (q, k)))


def hedgehog(feature_map, q, k):
    q = q @ feature_map.query_weight.T + feature_map.query_bias
    k = k @ feature_map.key_weight.T + feature_map.key_bias
    return 2 * (q + k).cosh().sum(-1) / (2 * q.cosh().sum(-1) * 2 * k.cosh().sum(-1))


def rebased(feature_map, q, k):
    def norm(x, gain, bias):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias

    q = norm(q, feature_map.query_gain, feature_map.query_bias)
    return dot(q, norm(k, feature_map.key_gain, feature_map.key_bias)) ** 2


def learned_favor(feature_map, q, k):
    q, k = (x / x.shape[-1] ** 0.25 for x in (q, k))
    exponents = [x @ feature_map.rows.T - (x * x).sum(-1, keepdim=True) / 2 + feature_map.bias for x in (q, k)]
    return (exponents[0] + exponents[1]).exp().mean(-1)


def floored(x, rectified, size):
    return rectified + 0.01 * size(1 + (x * x).mean(-1, keepdim=True))


# The kernel each exported map promises, from the map's parameters and raw q and k.
KERNELS = {
    "CosFormer": cos_former,
    "DPFP": dpfp,
    "EluPlusOne": both(lambda x: nn.functional.elu(x) + 1),
    "Exp": lambda _, q, k: (q + k).exp().sum(-1),
    "FavorHyperbolic": softmax_kernel,
    "FavorPlus": softmax_kernel,
    "FavorPlusPlus": softmax_kernel,
    "FavorReLU": arc_cosine,
    "Hedgehog": hedgehog,
    "LearnedFavor": learned_favor,
    "OnePlusCosine": lambda _, q, k: 1 + dot(unit(q), unit(k)),
    "RandomFourier": softmax_kernel,
    "ReBased": rebased,
    "ReLU": both(lambda x: floored(x, x.clamp(min=0), torch.sqrt)),
    "Sigmoid": both(lambda x: 1 / (1 + (-x).exp())),
    "SoftmaxExp": lambda _, q, k: (q + k).exp().sum(-1) / q.exp().sum(-1),
    "Softplus": both(lambda x: (1 + x.exp()).log()),
    "SquaredReLU": both(lambda x: floored(x, x.clamp(min=0) ** 2, lambda size: size)),
    "T2R": t2r,
    "Taylor": taylor,
}
RANDOM = ("FavorHyperbolic", "FavorPlus", "FavorPlusPlus", "FavorReLU", "RandomFourier")


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


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in RANDOM])
def test_products_are_the_kernel(name):
    feature_map = make_map(name, 8)
    with torch.no_grad():  # as training would leave them
        for parameter in feature_map.parameters():
            parameter.add_(0.3 * randn(*parameter.shape))
    q, k = randn(50, 8) / 2, randn(50, 8) / 2
    expected = KERNELS[name](feature_map, q, k)
    close(dot(feature_map.map_query(q), feature_map.map_key(k)), expected, 1e-12)


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("orthogonal", [True, False])
def test_products_are_the_kernel_on_average(name, orthogonal):
    q, k = randn(50, 8) / 2, randn(50, 8) / 2
    maps = [EXPORTED[name](8, num_features=64, orthogonal=orthogonal, seed=seed).double() for seed in range(400)]
    draws = torch.stack([dot(m.map_query(q), m.map_key(k)) for m in maps])
    error = (draws.mean(0) - KERNELS[name](maps[0], q, k)) / (draws.std(0) / math.sqrt(len(draws)))
    assert error.abs().max() < 5


@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_a_cosine_of_the_distance_weighs_cosformer(floor):
    feature_map = CosFormer(8, max_positions=100, floor=floor).double()
    q, k, at, by = randn(30, 8), randn(30, 8), torch.randint(0, 100, (30,)), torch.randint(0, 100, (30,))
    kernel = feature_map.map_query(q, at) @ feature_map.map_key(k, by).T
    r, s = (x.clamp(min=0) + floor * (1 + x.square().mean(-1, keepdim=True)).sqrt() for x in (q, k))
    expected = (r @ s.T) * torch.cos(math.pi * (at[:, None] - by).double() / 200)
    close(kernel, expected, 1e-12)
    assert floor == 0 or (kernel > 0).all()


def test_cosformer_knows_its_positions_and_refuses_others():
    feature_map = CosFormer(4, max_positions=10)
    feature_map.map_query(randn(2, 3, 10, 4))
    for positions in (None, torch.arange(11), torch.tensor([*range(10), -1])):
        with pytest.raises(ValueError, match=r"from 0 to max_positions - 1 = 9, got -?\d+ to \d+; make the map with"):
            feature_map.map_query(randn(2, 3, 11, 4), *(() if positions is None else (positions,)))
    layer = LinearAttention(8, 2, feature_map=partial(CosFormer, max_positions=10), normalizer="rms").double()
    state = layer.stream(randn(1, 10, 8))[1]
    with pytest.raises(ValueError, match="got 10 to 10"):
        layer.stream(randn(1, 1, 8), state)


def test_one_plus_cosine_is_the_kernel_that_rotation_leaves_positive():
    """Su 2021: 1 + R_m q̂·R_n k̂ ≥ 0, for the constant is the odd feature that is not turned."""
    feature_map = OnePlusCosine(8, floor=0.1).double()
    rotary = Rotary(base=10.0).for_width(feature_map.num_features)
    q, k = (rotary(feature_map.map_query(randn(200, 8)), torch.arange(200)) for _ in "qk")
    assert (q @ k.T).min() >= 0.1 - 1e-12


@pytest.mark.parametrize("kind", [T2R, ReLU, SquaredReLU, DPFP, CosFormer, OnePlusCosine, FavorReLU])
def test_a_floor_makes_the_kernel_positive(kind):
    assert not kind(8, floor=0.0).kernel_is_positive
    assert kind(8, floor=1e-3).kernel_is_positive
    for floor in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"floor must be at least 0 and finite, got {floor}"):
            kind(8, floor=floor)
    # Opposite vectors, which have no coordinate in common.
    x = randn(100, 8)
    feature_map = kind(8, floor=1e-3).double()
    assert (dot(feature_map.map_query(x), feature_map.map_key(-x)) > 0).all()


@every_map
@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
def test_a_map_that_says_its_kernel_is_positive_is_right(name, scale):
    feature_map = make_map(name, 8)
    kernel = feature_map.map_query(scale * randn(300, 8)) @ feature_map.map_key(scale * randn(300, 8)).mT
    if feature_map.kernel_is_positive:
        assert (kernel > 0).all()


@every_map
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaled_features_are_the_features_up_to_what_attention_divides_out(name, dtype):
    feature_map = make_map(name, 32, dtype)  # wide: no vector is below 0 in every coordinate
    x = randn(2, 30, 32, dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    features, log_scale = feature_map.scaled_key(x)
    scale = torch.zeros(2, 30, dtype=dtype) if log_scale is None else log_scale
    mapped = feature_map.map_query(x), feature_map.map_key(x)
    factors = []
    for whole, scaled in zip(mapped, (feature_map.scaled_query(x), features * scale[..., None].exp()), strict=True):
        factor = dot(scaled, whole.to(scaled.dtype)) / dot(whole, whole)
        assert (factor > 0).all()
        close(scaled, factor[..., None] * whole, tolerance)  # one factor for all features of a token
        factors.append(factor)
    close(factors[1], factors[1][:1, :1].expand_as(factors[1]), tolerance)  # one for all keys


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
    where = (torch.tensor([3]),) if feature_map.uses_positions else ()
    for method in ("map_query", "map_key", "scaled_query"):
        mapped = getattr(feature_map, method)
        close(mapped(loud)[1, 2, 3], mapped(x[1, 2, 3:4], *where)[0], 1e-13)
    features, log_scale = feature_map.scaled_key(loud)
    alone, alone_log_scale = feature_map.scaled_key(x[1, 2, 3:4], *where)
    close(features[1, 2, 3], alone[0], 1e-13)
    if log_scale is not None:
        close(log_scale[1, 2, 3], alone_log_scale[0], 1e-13)


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


def test_a_floor_that_float32_loses_is_refused():
    with pytest.raises(ValueError, match=r"floor must be 0 or at least 1e-4.*got 1e-08"):
        OnePlusCosine(8, floor=1e-8)


class Silent(FeatureMap):
    """A user's map that forgot to say whether it is positive."""

    def __init__(self, head_dim):
        super().__init__()
        self.head_dim = self.num_features = head_dim

    def map_query(self, query):
        return query


def test_a_map_that_does_not_say_is_told_so():
    with pytest.raises(TypeError, match="Silent does not say whether it is_positive"):
        LinearAttention(8, 2, feature_map=Silent)


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
