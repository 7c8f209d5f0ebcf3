"""Learned maps: where they begin, parameters of each head, and fitting them to softmax."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional

from linrope import T2R, EluPlusOne, Hedgehog, LearnedFavor, LinearAttention, ReBased, Rotary, SoftmaxAttention
from linrope.distillation import fit_to_softmax, kernel_cross_entropy
from tasks.optimizers import split_parameters
from tests.cases import close, randn

LEARNED = {
    "T2R": partial(T2R, floor=0.01),
    "Hedgehog": Hedgehog,
    "ReBased": ReBased,
    "LearnedFavor": LearnedFavor,
}
every_map = pytest.mark.parametrize("name", LEARNED)
H, D = 3, 8


def perturbed(feature_map):
    with torch.no_grad():
        for parameter in feature_map.parameters():
            parameter.add_(0.3 * randn(*parameter.shape).to(parameter.dtype))
    return feature_map


@every_map
def test_each_head_has_parameters_of_its_own(name):
    """Head i of a map of h heads is a map of its own, with slice i of every parameter."""
    together = perturbed(LEARNED[name](D).for_heads(H).double())
    x = randn(2, H, 5, D)
    for i in range(H):
        alone = LEARNED[name](D).double()
        alone.load_state_dict({key: tensor[i] for key, tensor in together.state_dict().items()})
        close(together.map_query(x)[:, i], alone.map_query(x[:, i]), 1e-12)
        close(together.map_key(x)[:, i], alone.map_key(x[:, i]), 1e-12)


@every_map
def test_a_layer_gives_its_heads_their_own(name):
    options = {} if name != "ReBased" else {"normalizer": "rms"}
    layer = LinearAttention(H * D, H, feature_map=LEARNED[name], **options)
    assert all(parameter.shape[0] == H for parameter in layer.feature_map.parameters())
    # Settings survive the way from the factory to the heads.
    assert layer.feature_map.num_features == LEARNED[name](D).num_features
    assert layer.feature_map.kernel_is_positive == LEARNED[name](D).kernel_is_positive


@every_map
def test_learned_maps_are_in_the_optimizer_and_learn(name):
    options = {} if name != "ReBased" else {"normalizer": "rms"}
    layer = LinearAttention(H * D, H, feature_map=LEARNED[name], **options)
    own = list(layer.feature_map.parameters())
    chosen = [p for group in split_parameters(layer) for p in group]
    assert all(any(p is q for q in chosen) for p in own)
    x = randn(2, 9, H * D).float()
    layer(x).square().sum().backward()
    assert all((parameter.grad != 0).any() for parameter in own)


def test_hedgehog_begins_as_the_identity():
    """Zhang et al. 2024: softmax([x, -x]) at first."""
    x = randn(20, D)
    expected = torch.cat((x, -x), -1).exp()
    close(Hedgehog(D).double().map_key(x), expected / expected.sum(-1, keepdim=True), 1e-12)


def test_rebased_begins_with_gain_one_and_bias_zero():
    x = randn(20, D)
    centred = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    feature_map = ReBased(D).double()
    close((feature_map.map_query(x) * feature_map.map_key(x)).sum(-1), centred.square().sum(-1) ** 2, 1e-12)


def test_t2r_begins_as_a_linear_layer_does():
    """Uniform within 1/√d: mean 0, variance 1/(3d)."""
    weight = torch.cat([T2R(16, 400).weight.flatten() for _ in range(5)]).double()
    assert weight.abs().max() <= 0.25
    assert abs(weight.mean()) < 5 * 0.25 / math.sqrt(3 * len(weight))
    assert abs(weight.square().mean() - 1 / 48) < 5 * math.sqrt(4 / 45) / 16 / math.sqrt(len(weight))


def test_learned_favor_begins_with_orthogonal_rows_that_differ_by_head():
    rows = LearnedFavor(D, D).for_heads(H).rows.double()
    for block in functional.normalize(rows, dim=-1):
        close(block @ block.T, torch.eye(D, dtype=torch.float64), 1e-6)
    assert not torch.allclose(rows[0], rows[1])


def test_a_seed_gives_the_same_learned_rows():
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(LearnedFavor(D).rows)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# Fitting to softmax.


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["T2R", "Hedgehog", "LearnedFavor"])
def test_the_cross_entropy_is_the_formula(name, causal):
    feature_map = perturbed(LEARNED[name](D).for_heads(H).double())
    query, key = randn(2, H, 7, D), randn(2, H, 7, D)
    kernel = feature_map.map_query(query) @ feature_map.map_key(key).mT
    p = (query @ key.mT / math.sqrt(D)).exp()
    if causal:
        p, kernel = p.tril(), kernel.tril()
    p, w = (x / x.sum(-1, keepdim=True) for x in (p, kernel))
    expected = -torch.where(p > 0, p * w.clamp(min=1e-300).log(), 0.0).sum(-1).mean()
    features, log_scale = feature_map.scaled_key(key)
    loss = kernel_cross_entropy(feature_map.scaled_query(query), features, p, key_log_scale=log_scale)
    close(loss, expected, 1e-10)


def test_the_cross_entropy_is_least_where_the_kernels_agree():
    """Gibbs: -Σ p ln w ≥ -Σ p ln p, with equality at w = p; and its gradient is that of the formula."""
    query, key = (randn(1, 1, 4, 3).abs().requires_grad_() for _ in "qk")
    p = (query @ key.mT).detach()
    p = p / p.sum(-1, keepdim=True)
    loss = kernel_cross_entropy(query, key, p)
    close(loss, -(p * p.log()).sum(-1).mean(), 1e-12)
    for grad in torch.autograd.grad(loss, (query, key)):
        assert grad.abs().max() < 1e-12
    target = torch.rand_like(p).softmax(-1)
    assert torch.autograd.gradcheck(lambda q, k: kernel_cross_entropy(q, k, target), (query, key))


@pytest.mark.parametrize("name", ["T2R", "Hedgehog", "LearnedFavor"])
@pytest.mark.parametrize("rotated", [False, True])
def test_fitting_brings_a_layer_nearer_to_softmax(name, rotated):
    """The loss falls, and on inputs it has not seen the outputs come nearer."""
    rotary = {"rotary": Rotary()} if rotated else {}
    teacher = SoftmaxAttention(H * D, H, **rotary).double()
    with torch.no_grad():  # weights that tell keys apart
        teacher.query.weight.mul_(3)
        teacher.key.weight.mul_(3)
    before = {"rotary_placement": "before"} if rotated else {}
    student = LinearAttention(H * D, H, feature_map=LEARNED[name], **rotary, **before).double()
    fit_to_softmax(student, teacher, [])  # the projections alone
    unseen = randn(8, 20, H * D)

    def error():
        return (student(unseen) - teacher(unseen)).square().mean().item()

    first = error()
    losses = fit_to_softmax(student, teacher, [randn(8, 20, H * D) for _ in range(60)])
    assert len(losses) == 60
    assert sum(losses[-5:]) < sum(losses[:5])
    assert error() < first


def test_fitting_trains_the_map_alone():
    teacher = SoftmaxAttention(H * D, H)
    student = LinearAttention(H * D, H, feature_map=Hedgehog)
    map_before = [p.clone() for p in student.feature_map.parameters()]
    fit_to_softmax(student, teacher, [randn(2, 9, H * D).float()])
    for name in ("query", "key", "value", "out"):
        assert torch.equal(getattr(student, name).weight, getattr(teacher, name).weight)
    assert not any(map(torch.equal, map_before, student.feature_map.parameters()))
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_what_the_layer_divides_by_does_not_matter_to_the_fit():
    """Long queries and keys, whose whole features would vanish."""
    teacher, x = SoftmaxAttention(H * D, H), [30 * randn(2, 9, H * D).float() for _ in range(3)]
    losses = []
    for normalizer in ("features", "rms", None):
        torch.manual_seed(5)
        student = LinearAttention(H * D, H, feature_map=LearnedFavor, normalizer=normalizer)
        losses.append(fit_to_softmax(student, teacher, x))
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][0] != losses[0][1]


def test_what_cannot_be_fitted_is_refused():
    teacher = SoftmaxAttention(H * D, H)
    with pytest.raises(ValueError, match="EluPlusOne has no parameters"):
        fit_to_softmax(LinearAttention(H * D, H, feature_map=EluPlusOne), teacher, [])
    with pytest.raises(ValueError, match="kernel of ReBased can be 0 or negative"):
        fit_to_softmax(LinearAttention(H * D, H, feature_map=ReBased, normalizer="rms"), teacher, [])
    with pytest.raises(ValueError, match=r"\(24, 2, True, None\) and \(24, 3, True, None\)"):
        fit_to_softmax(LinearAttention(H * D, 2, feature_map=Hedgehog), teacher, [])
    with pytest.raises(ValueError, match=r"\(24, 3, False, None\) and \(24, 3, True, None\)"):
        fit_to_softmax(LinearAttention(H * D, H, feature_map=Hedgehog, causal=False), teacher, [])
