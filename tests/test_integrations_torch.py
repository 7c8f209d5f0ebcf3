"""Linear attention with the calls of torch.nn.MultiheadAttention, alone and inside torch's own layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linrope import EluPlusOne, FavorPlus, Hedgehog, KernelAttention, Rotary
from linrope.integrations.torch import LinearMultiheadAttention, replace_attention

B, N, S, E, H = 3, 7, 5, 12, 2
KINDS = {
    "elu+1": {},
    "rotary": {"rotary": Rotary()},
    "before": {"rotary": Rotary(), "rotary_placement": "before"},
    "favor": {"feature_map": FavorPlus},
    "hedgehog": {"feature_map": Hedgehog},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind="elu+1", **options):
    return LinearMultiheadAttention(E, H, **{"dtype": torch.float64, "batch_first": True, **KINDS[kind], **options})


def inputs(n=N, s=S, kdim=E, vdim=E):
    return [torch.randn(B, length, width, dtype=torch.float64) for length, width in ((n, E), (s, kdim), (s, vdim))]


def by_hand(layer, query, key, value, allowed):
    """From the explicit matrix of weights: numerators of rotated features, normalizers of those that are not."""
    if layer.kdim == layer.vdim == E:
        matrices = layer.in_proj_weight.chunk(3)
    else:
        matrices = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
    biases = layer.in_proj_bias.chunk(3) if layer.in_proj_bias is not None else (0, 0, 0)
    q, k, v = (
        (x @ m.T + b).unflatten(-1, (H, -1)).transpose(1, 2)
        for x, m, b in zip((query, key, value), matrices, biases, strict=True)
    )
    kernel, feature_map = layer.kernel, layer.kernel.feature_map
    places = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    if kernel.rotary is not None and kernel.rotary_placement == "before":
        q, k = kernel.rotary(q, places[0]), kernel.rotary(k, places[1])
    q, k = feature_map.map_query(q), feature_map.map_key(k)
    normalizer = (q @ k.mT) * allowed
    if kernel.rotary is not None and kernel.rotary_placement == "numerator":
        q, k = kernel.rotary(q, places[0]), kernel.rotary(k, places[1])
    weights = (q @ k.mT) * allowed / normalizer.sum(-1, keepdim=True)
    output = (weights @ v).transpose(1, 2).flatten(2)
    return layer.out_proj(output), weights


@every_kind
@pytest.mark.parametrize("masked", [False, True])
def test_output_and_weights_are_those_of_the_formula(kind, masked):
    layer, (query, key, value) = make(kind), inputs()
    padding = torch.zeros(B, S, dtype=torch.bool)
    if masked:
        padding[0, 3:] = padding[2, 0] = True
    expected, weights = by_hand(layer, query, key, value, ~padding[:, None, None])
    output, averaged = layer(query, key, value, key_padding_mask=padding if masked else None)
    assert_close(output, expected, rtol=1e-9, atol=1e-9)
    assert_close(averaged, weights.mean(1), rtol=1e-9, atol=1e-9)
    _, single = layer(query, key, value, key_padding_mask=padding if masked else None, average_attn_weights=False)
    assert_close(single, weights, rtol=1e-9, atol=1e-9)
    assert layer(query, key, value, need_weights=False)[1] is None
    _, of_torch = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)(query, key, value)
    assert averaged.shape == of_torch.shape


@every_kind
def test_causal_by_flag_or_mask_in_any_of_its_forms(kind):
    layer, (x, _, _) = make(kind), inputs()
    expected, weights = by_hand(layer, x, x, x, torch.ones(N, N).tril())
    assert_close(layer(x, x, x, is_causal=True)[1], weights.mean(1), rtol=1e-9, atol=1e-9)
    bools = torch.ones(N, N, dtype=torch.bool).triu(1)
    floats = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    for how in (
        {"is_causal": True},
        {"attn_mask": bools},
        {"attn_mask": floats},
        {"attn_mask": floats, "is_causal": True},
        {"attn_mask": floats.expand(B * H, N, N)},
    ):
        assert_close(layer(x, x, x, need_weights=False, **how)[0], expected, rtol=1e-9, atol=1e-9)
    everything, _ = by_hand(layer, x, x, x, torch.ones(N, N))
    assert_close(layer(x, x, x, attn_mask=torch.zeros(N, N))[0], everything, rtol=1e-9, atol=1e-9)


def test_axes_in_any_order_torch_takes():
    layer, (query, key, value) = make(), inputs()
    expected, weights = layer(query, key, value)
    layer.batch_first = False
    turned, same = layer(*(x.transpose(0, 1) for x in (query, key, value)))
    assert_close(turned.transpose(0, 1), expected)
    assert_close(same, weights)
    mask = torch.tensor([False, True, False, False, True])
    single, its_weights = layer(query[0], key[0], value[0], key_padding_mask=mask)
    layer.batch_first = True
    of_batch, weights = layer(query, key, value, key_padding_mask=mask.expand(B, S))
    assert_close(single, of_batch[0])
    assert_close(its_weights, weights[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(E, E), (8, 10), (E, 10)])
def test_other_widths_and_no_biases(bias, widths):
    layer, (query, key, value) = make(bias=bias, kdim=widths[0], vdim=widths[1]), inputs(N, S, *widths)
    expected, _ = by_hand(layer, query, key, value, torch.ones(S))
    assert_close(layer(query, key, value)[0], expected, rtol=1e-9, atol=1e-9)
    theirs = nn.MultiheadAttention(E, H, bias=bias, kdim=widths[0], vdim=widths[1], dtype=torch.float64)
    assert layer.state_dict().keys() == theirs.state_dict().keys()
    layer.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(layer.state_dict())


def test_first_values_are_torchs():
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, H)
    torch.manual_seed(3)
    ours = LinearMultiheadAttention(E, H)
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "no weights to drop"),
        ({"add_bias_kv": True}, "no added keys"),
        ({"add_zero_attn": True}, "no added keys"),
        (
            {"feature_map": lambda d: FavorPlus(d, num_features=4), "rotary_placement": "after"},
            "rotary_placement must be",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
    with pytest.raises(ValueError, match="num_heads must divide d_model"):
        LinearMultiheadAttention(E, 5)


def test_masks_that_linear_attention_cannot_have_are_refused():
    layer, (query, key, value) = make(), inputs()
    with pytest.raises(ValueError, match=r"attn_mask must be the causal one, \(7, 5\), or mask nothing"):
        layer(query, key, value, attn_mask=torch.rand(N, S) > 0.5)
    with pytest.raises(ValueError, match="adds nothing to scores"):
        layer(query, key, value, attn_mask=torch.full((N, S), 0.5))
    with pytest.raises(ValueError, match="key_padding_mask must be bool"):
        layer(query, key, value, key_padding_mask=torch.full((B, S), -1.0))
    with pytest.raises(ValueError, match="as many keys as queries"):
        layer(query, key, value, is_causal=True)
    with pytest.raises(ValueError, match="must all be batched"):
        layer(query, key[0], value)
    unnormalized = make(normalizer="rms")
    with pytest.raises(ValueError, match="need_weights=False"):
        unnormalized(query, key, value)
    assert unnormalized(query, key, value, need_weights=False)[0].shape == query.shape


@every_kind
@pytest.mark.parametrize("norm_first", [False, True])
def test_inside_torchs_encoder_layer_in_training_and_in_its_fast_path(kind, norm_first):
    """In eval mode without gradients torch's layer would compute softmax by itself; it must not."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64),
        2,
        enable_nested_tensor=not norm_first,
    )
    before = copy.deepcopy(encoder)
    names = replace_attention(encoder, **KINDS[kind])
    assert names == ["layers.0.self_attn", "layers.1.self_attn"]
    (x, _, _), padding = inputs(), torch.zeros(B, N, dtype=torch.bool)
    padding[1, 4:] = True
    training = encoder.train()(x, src_key_padding_mask=padding)
    with torch.no_grad():
        resting = encoder.eval()(x, src_key_padding_mask=padding)
        softmax = before.eval()(x, src_key_padding_mask=padding)
    assert_close(training[~padding], resting[~padding], rtol=1e-9, atol=1e-9)
    assert (resting - softmax)[~padding].abs().max() > 1e-3
    alone = encoder(x[1:2, :4])
    assert_close(resting[1:2, :4], alone, rtol=1e-9, atol=1e-9)
    mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    causal = encoder(x, mask=mask, is_causal=True)
    changed = x.clone()
    changed[:, 4:] = 9.0
    assert torch.equal(encoder(changed, mask=mask, is_causal=True)[:, :4], causal[:, :4])
    assert_close(encoder(x, mask=mask), causal)


def test_inside_torchs_decoder_layer_self_and_cross():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    assert replace_attention(layer) == ["self_attn", "multihead_attn"]
    target, memory, _ = inputs()
    mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    output = layer(target, memory, tgt_mask=mask, tgt_is_causal=True)
    x = layer.norm1(target + by_hand(layer.self_attn, target, target, target, torch.ones(N, N).tril())[0])
    x = layer.norm2(x + by_hand(layer.multihead_attn, x, memory, memory, torch.ones(S))[0])
    x = layer.norm3(x + layer.linear2(layer.linear1(x).relu()))
    assert_close(output, x, rtol=1e-9, atol=1e-9)


def test_replacing_keeps_the_parameters_themselves_and_modules_that_are_shared():
    shared = nn.MultiheadAttention(E, H, dropout=0.3)
    model = nn.ModuleDict(
        {"a": shared, "b": nn.Sequential(shared), "c": nn.MultiheadAttention(E, H, bias=False, kdim=8)}
    )
    before = dict(model.named_parameters())
    assert replace_attention(model.eval(), feature_map=FavorPlus) == ["a", "b.0", "c"]
    assert model["a"] is model["b"][0]
    assert not model["c"].training
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_nothing_to_replace_and_what_cannot_be_replaced_change_nothing():
    with pytest.raises(ValueError, match=r"Linear holds no nn\.MultiheadAttention"):
        replace_attention(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="itself a MultiheadAttention"):
        replace_attention(nn.MultiheadAttention(E, H))
    model = nn.ModuleList([nn.MultiheadAttention(E, H), nn.MultiheadAttention(E, H, add_zero_attn=True)])
    with pytest.raises(ValueError, match="no added keys"):
        replace_attention(model)
    assert all(type(module) is nn.MultiheadAttention for module in model)


def test_it_trains():
    """The average of the values is a task that attention learns at once: the loss falls to a tenth."""
    torch.manual_seed(0)
    layer = LinearMultiheadAttention(E, H, batch_first=True, feature_map=Hedgehog)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x = torch.randn(8, N, E)
    target = x.mean(1, keepdim=True).expand_as(x)
    losses = []
    for _ in range(150):
        loss = (layer(x, x, x, need_weights=False)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_heads_alone_are_what_stands_between_the_projections():
    kernel = KernelAttention(4, H, rotary=Rotary(), feature_map=EluPlusOne).double()
    query, key, value = torch.randn(3, B, H, N, 4, dtype=torch.float64)
    phi = EluPlusOne(4)
    q, k = phi.map_query(query), phi.map_key(key)
    places = torch.arange(N)
    mask = torch.ones(N, N).tril()
    numerator = (kernel.rotary(q, places) @ kernel.rotary(k, places).mT * mask) @ value
    expected = numerator / (q @ k.mT * mask).sum(-1, keepdim=True)
    assert_close(kernel(query, key, value), expected, rtol=1e-9, atol=1e-9)
    first, state = kernel.stream(query[:, :, :3], key[:, :, :3], value[:, :, :3])
    rest, _ = kernel.stream(query[:, :, 3:], key[:, :, 3:], value[:, :, 3:], state)
    assert_close(torch.cat((first, rest), 2), expected, rtol=1e-9, atol=1e-9)
    of_all = (kernel.rotary(q, places) @ kernel.rotary(k, places).mT) @ value / (q @ k.mT).sum(-1, keepdim=True)
    assert_close(kernel(query, key, value, causal=False), of_all, rtol=1e-9, atol=1e-9)
