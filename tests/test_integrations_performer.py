"""linrope's attention inside performer-pytorch's own models."""

from __future__ import annotations

import copy

import pytest
import torch
from performer_pytorch import PerformerLM
from performer_pytorch import performer_pytorch as theirs
from torch.testing import assert_close

from linrope import FeatureMap, Rotary, redraw_feature_maps
from linrope.integrations.performer_pytorch import PerformerAttention, replace_attention

N = 24


def model(**options):
    torch.manual_seed(0)
    settings = {"num_tokens": 256, "max_seq_len": N, "dim": 32, "depth": 2, "heads": 2, "dim_head": 16, "causal": True}
    return PerformerLM(**{**settings, **options}).double().eval()


def both(**options):
    """The same model twice, with their attention and with ours."""
    one = model(**options)
    other = copy.deepcopy(one)
    assert len(replace_attention(other)) == 2 * (1 + bool(options.get("cross_attend")))
    return one, other


@pytest.fixture
def no_epsilon(monkeypatch):
    """Theirs without what it adds: then it is right up to rounding, wherever nothing is masked."""
    kernel, causal = theirs.softmax_kernel, theirs.causal_linear_attention_noncuda
    monkeypatch.setattr(theirs, "softmax_kernel", lambda *a, **k: kernel(*a, **k, eps=0.0))
    monkeypatch.setattr(theirs, "causal_linear_attention_noncuda", lambda q, k, v: causal(q, k, v, eps=0.0))


MODELS = {
    "causal": {},
    "all at once": {"causal": False},
    "absolute positions": {"rotary_position_emb": False},
    "local heads": {"local_attn_heads": 1, "local_window_size": 8},
    "biases": {"qkv_bias": True},
}


@pytest.mark.usefixtures("no_epsilon")
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_logits_and_gradients_are_theirs_without_the_epsilon(options):
    one, other = both(**options)
    tokens = torch.randint(0, 256, (2, N))
    expected, output = one(tokens), other(tokens)
    assert_close(output, expected, rtol=1e-8, atol=1e-8)
    for logits in (expected, output):
        logits.square().mean().backward()
    gradients = [dict(m.named_parameters()) for m in (one, other)]
    assert gradients[0].keys() == gradients[1].keys()
    for name, parameter in gradients[0].items():
        if parameter.grad is not None:
            assert_close(gradients[1][name].grad, parameter.grad, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_as_it_is_their_epsilon_moves_logits_by_a_hundredth_at_most(options):
    """At initialisation; it is a ten-thousandth, against features of about 1."""
    one, other = both(**options)
    tokens = torch.randint(0, 256, (2, N))
    with torch.no_grad():
        expected, output = one(tokens), other(tokens)
    assert 0 < (output - expected).norm() / expected.norm() < 1e-2


def test_later_tokens_change_earlier_logits_of_theirs_but_not_of_ours():
    """Queries and keys twice as long as at initialisation: theirs move by a tenth, ours stay to the last bit."""
    one, other = both()
    for m in (one, other):
        for name, parameter in m.named_parameters():
            if "to_q" in name or "to_k" in name:
                parameter.data *= 2
    tokens = torch.randint(0, 256, (2, N))
    changed = tokens.clone()
    changed[:, N // 2 :] = torch.randint(0, 256, (2, N - N // 2))
    with torch.no_grad():
        leak, ours = ((m(changed) - m(tokens))[:, : N // 2].abs().max() for m in (one, other))
    assert leak > 0.01
    assert ours == 0


def test_padding_counts_in_theirs_but_not_in_ours():
    one, other = both(causal=False)
    tokens = torch.randint(0, 256, (2, N))
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[:, N // 2 :] = False
    with torch.no_grad():
        short = [m(tokens[:, : N // 2]) for m in (one, other)]
        padded = [m(tokens, mask=mask)[:, : N // 2] for m in (one, other)]
    assert (padded[0] - short[0]).norm() / short[0].norm() > 0.05
    assert_close(padded[1], short[1], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("no_epsilon")
def test_cross_attention_reads_its_context_and_its_mask():
    torch.manual_seed(0)
    cross = theirs.CrossAttention(32, heads=2, dim_head=16).double().eval()
    ours = PerformerAttention(cross)
    x, context = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 9, 32, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 6:] = False
    with torch.no_grad():
        assert_close(ours(x, context=context), cross(x, context=context), rtol=1e-8, atol=1e-8)
        assert_close(
            ours(x, context=context, context_mask=mask), cross(x, context=context[:, :6]), rtol=1e-8, atol=1e-8
        )


def test_weights_and_rows_are_taken_over_and_the_rows_redrawn_by_step():
    one = model()
    rows = [m.fast_attention.projection_matrix.clone() for m in one.modules() if isinstance(m, theirs.Attention)]
    weights = dict(one.named_parameters())
    assert replace_attention(one, redraw_interval=3)
    assert all(dict(one.named_parameters())[name] is weights[name] for name in weights)
    maps = [module for module in one.modules() if isinstance(module, FeatureMap)]
    for feature_map, row in zip(maps, rows, strict=True):
        assert_close(feature_map.projection.rows.double(), row, rtol=1e-7, atol=0)
    redraw_feature_maps(one, 2)
    assert_close(maps[0].projection.rows.double(), rows[0], rtol=1e-7, atol=0)
    redraw_feature_maps(one, 3)
    assert not torch.equal(maps[0].projection.rows.double(), rows[0])
    one.train()(torch.randint(0, 256, (1, N)))  # their updater finds nothing to redraw, and does not stumble


def test_a_rotation_of_ours_takes_the_place_of_theirs_in_the_numerator():
    one = model()
    replace_attention(one, rotary=Rotary())
    kernels = [module.kernel for module in one.modules() if isinstance(module, PerformerAttention)]
    assert all(kernel.rotary_placement == "numerator" and kernel.rotary is not None for kernel in kernels)
    layer = next(module for module in one.modules() if isinstance(module, PerformerAttention))
    x = torch.randn(2, N, 32, dtype=torch.float64)
    anything = torch.randn(1, N, 16, dtype=torch.float64)
    assert torch.equal(layer(x, pos_emb=anything), layer(x))


@pytest.mark.parametrize("option", ["generalized_attention", "no_projection"])
def test_other_kernels_are_refused_and_nothing_is_changed(option):
    one = model(**{option: True})
    with pytest.raises(ValueError, match=r"only FAVOR\+ attention can be taken over"):
        replace_attention(one)
    assert not any(isinstance(module, PerformerAttention) for module in one.modules())
    with pytest.raises(ValueError, match="Linear holds no attention of performer-pytorch"):
        replace_attention(torch.nn.Linear(2, 2))
