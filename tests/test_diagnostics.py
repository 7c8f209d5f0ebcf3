"""What layers do, in numbers: weights that make the layers' own outputs, and measures by their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from einops import rearrange
from torch import nn
from torch.testing import assert_close

from linrope import (
    ByteTransformer,
    DynamicNTKScaling,
    FavorPlus,
    FeatureMap,
    KernelAttention,
    LearnedRotary,
    LinearAttention,
    Rotary,
    SoftmaxAttention,
)
from linrope.diagnostics import QUANTILES, Weights, attention_weights, diagnose
from linrope.integrations.torch import LinearMultiheadAttention
from tests.cases import MAPS, PLACEMENTS, attention_options, close, mostly_slow, randn

N = 11


def weights_of(model, *inputs, **options) -> Weights:
    (weights,) = attention_weights(model, *inputs, **options).values()
    return weights


# ---- the weights are those of the layer ----


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("which", mostly_slow(f"{name}-{placement}" for name in MAPS for placement in PLACEMENTS))
def test_weights_times_values_are_the_output(which, causal):
    name, _, placement = which.rpartition("-")
    layer = KernelAttention(4, 4, **attention_options(name, placement), causal=causal).double()
    query, key, value = randn(2, 4, N, 4), randn(2, 2, N, 4), randn(2, 2, N, 5)
    options = {"key_mask": torch.rand(2, N) > 0.3, "query_positions": torch.arange(3, 3 + N)}
    found = weights_of(layer, query, key, value, **options)
    close(found.weights @ value.repeat_interleave(2, 1), layer(query, key, value, **options), 1e-9)


def test_small_values_under_rms():
    """There the 1e-6 that is added to the mean square counts."""
    layer = KernelAttention(4, 2, rotary=Rotary(), normalizer="rms").double()
    query, key, value = randn(1, 2, N, 4), randn(1, 2, N, 4), randn(1, 2, N, 4) * 1e-3
    close(weights_of(layer, query, key, value).weights @ value, layer(query, key, value), 1e-9)


def test_without_a_normalizer_and_in_packed_rows():
    layer = KernelAttention(4, 2, rotary=Rotary(), normalizer=None).double()
    query, key, value = (randn(1, 2, N, 4) for _ in range(3))
    offsets = torch.tensor([0, 4, 4, N])
    found = weights_of(layer, query, key, value, offsets=offsets)
    close(found.weights @ value, layer(query, key, value, offsets=offsets), 1e-10)


def test_packed_rows_under_a_rotation_that_follows_their_length():
    layer = KernelAttention(4, 2, rotary=Rotary(scaling=DynamicNTKScaling(2))).double()
    query, key, value = (randn(1, 2, N, 4) for _ in range(3))
    found = weights_of(layer, query, key, value)
    close(found.weights @ value, layer(query, key, value), 1e-10)
    with pytest.raises(ValueError, match="diagnose them one by one"):
        weights_of(layer, query, key, value, offsets=torch.tensor([0, 4, N]))


@pytest.mark.parametrize("placement", ["before", "numerator"])
def test_learned_frequencies(placement):
    options = {"num_features": 8} if placement == "numerator" else {}
    layer = KernelAttention(
        4,
        2,
        rotary=LearnedRotary(**options),
        rotary_placement=placement,
        feature_map=lambda d: FavorPlus(d, num_features=8),
    ).double()
    query, key, value = (randn(1, 2, N, 4) for _ in range(3))
    found = weights_of(layer, query, key, value)
    close(found.weights @ value, layer(query, key, value), 1e-9)
    # Beside softmax with the frequencies that they begin as, in float32.
    fixed = KernelAttention(4, 2, rotary=Rotary()).double()
    close(found.softmax, weights_of(fixed, query, key, value).softmax, 1e-5)


def test_cross_attention_and_softmax():
    for layer in (LinearAttention(8, 2, causal=False), SoftmaxAttention(8, 2, causal=False, rotary=Rotary())):
        layer.double()
        x, context, mask = randn(2, 5, 8), randn(2, N, 8), torch.rand(2, N) > 0.3
        found = weights_of(layer, x, context, key_mask=mask)
        value = rearrange(layer.value(context), "b s (h e) -> b h s e", h=2)
        output = layer.out(rearrange(found.weights @ value, "b h n e -> b n (h e)"))
        close(output, layer(x, context, key_mask=mask), 1e-10)


def test_causal_layers_are_cut_and_what_is_left_is_the_same():
    for layer in (LinearAttention(8, 2, rotary=Rotary()), SoftmaxAttention(8, 2)):
        x = randn(2, N, 8)
        whole, cut = weights_of(layer.double(), x), weights_of(layer, x, max_tokens=4)
        assert_close(cut.weights, whole.weights[:, :, :4, :4])
        assert_close(cut.softmax, whole.softmax[:, :, :4, :4])


# ---- the measures ----


class Ones(FeatureMap):
    is_positive = True

    def __init__(self, head_dim):
        super().__init__()
        self.head_dim, self.num_features = head_dim, 2

    def map_query(self, query):
        return torch.ones_like(query)


def test_two_keys_one_frequency():
    """Keys at 0 and 3, query at 3, one frequency of 1 rad a token: weights cos(3)/2 and 1/2."""
    layer = KernelAttention(2, 1, feature_map=Ones, rotary=Rotary(), causal=False).double()
    query, key = randn(1, 1, 1, 2), randn(1, 1, 2, 2)
    positions = {"query_positions": torch.tensor([3]), "key_positions": torch.tensor([0, 3])}
    found = diagnose(layer, query, key, key, **positions)[""]
    far, near = math.cos(3) / 2, 0.5
    p = -far / (near - far)
    for name, expected in {
        "negative_share": 0.5,
        "growth": near - far,
        "smallest_normalizer": 1.0,
        "entropy": -p * math.log(p) - (1 - p) * math.log(1 - p),
        "effective_rank": 1.0,
        "distance": 3 * p,
    }.items():
        assert getattr(found, name).item() == pytest.approx(expected, abs=1e-12), name
    assert_close(found.row_sums, torch.full((1, len(QUANTILES)), far + near, dtype=torch.float64))


def measured(weights, **options):
    weights = weights.double()[None, None]
    attended = torch.ones_like(weights, dtype=torch.bool)
    n, s = weights.shape[2:]
    apart = (torch.arange(n)[:, None] - torch.arange(s)).abs().double()[None, None]
    return Weights(weights, options.get("attended", attended), apart, options.get("softmax", weights), None).measure()


def test_uniform_attention():
    found = measured(torch.full((N, N), 1 / N))
    assert found.entropy.item() == pytest.approx(math.log(N))
    assert found.effective_rank.item() == pytest.approx(1)
    assert found.distance.item() == pytest.approx((N * N - 1) / (3 * N))  # mean |t - s| of all pairs
    assert found.negative_share.item() == 0
    assert found.smallest_normalizer.isnan().all()


def test_attention_to_oneself():
    found = measured(torch.eye(N))
    assert found.entropy.item() == pytest.approx(0)
    assert found.effective_rank.item() == pytest.approx(N)
    assert found.distance.item() == 0


def test_row_sums_growth_and_error():
    weights = torch.tensor([[1.0, 0.0], [3.0, -1.0]])
    found = measured(weights, softmax=torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64))
    assert_close(found.row_sums[0, [0, -1]], torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert found.growth.item() == 4
    assert found.softmax_error.item() == pytest.approx(math.sqrt((9 + 4) / 2))
    assert found.negative_share.item() == 0.25


def test_queries_with_nothing_to_attend_to_do_not_count():
    attended = torch.tensor([[False, False], [True, True]])[None, None]
    found = measured(torch.tensor([[0.0, 0.0], [0.5, 0.5]]), attended=attended)
    assert found.entropy.item() == pytest.approx(math.log(2))
    assert_close(found.row_sums, torch.ones(1, len(QUANTILES), dtype=torch.float64))


def test_the_normalizer_relative_to_the_features():
    """φ(q)·φ(k) / ‖φ(q)‖‖φ(k)‖ of one key is the cosine of the mapped vectors."""
    layer = LinearAttention(4, 1).double()
    x = randn(1, 1, 4)
    mapped = [torch.where(y > 0, y + 1, y.exp()) for y in (layer.query(x), layer.key(x))]
    expected = torch.cosine_similarity(*mapped, dim=-1).min().item()
    assert diagnose(layer, x)["kernel"].smallest_normalizer.item() == pytest.approx(expected)


def test_softmax_is_met_exactly_by_itself_and_ever_better_by_more_features():
    assert diagnose(SoftmaxAttention(8, 2, rotary=Rotary()), randn(1, N, 8).float())[""].softmax_error.abs().max() == 0
    query, key, value = (randn(1, 1, 64, 8) / 4 for _ in range(3))
    errors = []
    for m in (64, 1024):
        drawn = []
        for seed in range(8):
            layer = KernelAttention(
                8, 1, feature_map=lambda d, m=m, s=seed: FavorPlus(d, num_features=m, seed=s)
            ).double()
            drawn.append(diagnose(layer, query, key, value)[""].softmax_error.square().item())
        errors.append(math.sqrt(sum(drawn) / len(drawn)))
    assert errors[1] / errors[0] == pytest.approx(1 / 4, rel=0.4)  # as the root of m


# ---- models ----


def test_a_model_is_looked_at_and_left_as_it_was():
    torch.manual_seed(0)
    model = ByteTransformer(num_layers=2, d_model=16, attention=lambda d: LinearAttention(d, 2), dropout=0.5)
    model.blocks[0].eval()
    tokens, before = torch.randint(0, 256, (2, N)), torch.random.get_rng_state()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    found = diagnose(model, tokens)
    assert list(found) == ["blocks.0.attention.kernel", "blocks.1.attention.kernel"]
    assert [block.training for block in model.blocks] == [False, True]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert_close(found["blocks.0.attention.kernel"].row_sums, torch.ones(2, len(QUANTILES), dtype=torch.float64))


def test_dropout_is_not_looked_at():
    torch.manual_seed(0)
    model = ByteTransformer(num_layers=2, d_model=16, attention=lambda d: LinearAttention(d, 2), dropout=0.5)
    tokens = torch.randint(0, 256, (1, N))
    training = diagnose(model.train(), tokens)["blocks.1.attention.kernel"]
    evaluating = diagnose(model.eval(), tokens)["blocks.1.attention.kernel"]
    assert torch.equal(training.entropy, evaluating.entropy)


def test_layers_inside_other_peoples_models():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.self_attn = LinearMultiheadAttention(8, 2, batch_first=True, rotary=Rotary())
    (found,) = diagnose(layer, torch.randn(1, N, 8)).values()
    assert found.negative_share.shape == (2,)
    assert (found.growth >= found.row_sums[:, -1] - 1e-12).all()


def test_a_fraction_that_turns_features_but_no_pair_of_queries():
    layer = KernelAttention(
        8, 1, feature_map=lambda d: FavorPlus(d, num_features=32), rotary=Rotary(fraction=0.1)
    ).double()
    query, key, value = (randn(1, 1, N, 8) for _ in range(3))
    found = weights_of(layer, query, key, value)
    scores = (query @ key.mT / 8**0.5).masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf)
    close(found.softmax, scores.softmax(-1), 1e-10)


def test_where_nothing_is_divided_there_is_no_normalizer():
    layer = KernelAttention(4, 2, rotary=Rotary(), normalizer="rms").double()
    found = diagnose(layer, *(randn(1, 2, N, 4) for _ in range(3)))[""]
    assert found.smallest_normalizer.isnan().all()
    assert found.softmax_error.isnan().all()
    assert found.entropy.isfinite().all()


def test_a_layer_that_draws_leaves_the_generator_alone():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = LinearAttention(4, 1)

        def forward(self, x):
            return self.layer(x + torch.randn_like(x))

    model, x = Noisy(), torch.randn(1, N, 4)
    before = torch.random.get_rng_state()
    diagnose(model, x)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_is_not_finite_is_measured_as_far_as_it_goes():
    found = measured(torch.tensor([[1.0, 0.0], [torch.nan, 1.0]]))
    assert found.effective_rank.isnan().all()
    assert found.negative_share.item() == 0


def test_what_cannot_be_diagnosed():
    with pytest.raises(ValueError, match="Linear called no attention layer"):
        diagnose(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="no query has a key to attend to: 0 queries"):
        diagnose(LinearAttention(4, 1), torch.ones(1, 0, 4))
    with pytest.raises(ValueError, match="max_tokens must be at least 5, got 4"):
        diagnose(LinearAttention(4, 1, causal=False), torch.ones(1, 5, 4), max_tokens=4)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        diagnose(LinearAttention(4, 1), torch.ones(1, 2, 4), max_tokens=0)
