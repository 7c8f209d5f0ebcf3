"""Packed sequences: equal to running them apart, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from linrope import CosFormer, EluPlusOne, FavorPlus, LinearAttention, Rotary, linear_attention
from linrope.attention.packing import packed_positions
from tests.cases import has_compiler

LENGTHS = {
    "mixed": [3, 1, 0, 8, 5, 0, 70, 2],
    "to be sorted back": [3, 9, 4, 1, 10, 0, 2, 1],
    "one": [13],
    "empty ends": [0, 4, 4, 0],
    "ones": [1] * 9,
}
every_length = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
H, M, E = 2, 6, 5


def offsets_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def apart(function, tensors, lengths, axis):
    """What ``function`` gives for each sequence alone, end to end."""
    parts = zip(*(x.split(lengths, dim=axis) for x in tensors), strict=True)
    return torch.cat([function(*part) for part, length in zip(parts, lengths, strict=True) if length], dim=axis)


@every_length
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("native", marks=pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")),
        "chunked",
        "reference",
    ],
)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "log-scales"])
def test_features_packed_equal_features_apart(lengths, causal, backend, scaled):
    torch.manual_seed(0)
    n = sum(lengths)
    tensors = [torch.rand(1, H, n, width, dtype=torch.float64) for width in (M, M, E)]
    scale = torch.randn(1, H, n, dtype=torch.float64) * 3
    mask = torch.rand(1, n) > 0.2
    weight = torch.randn(1, H, n, E, dtype=torch.float64)
    options = {"rotary": Rotary(), "causal": causal, "backend": backend}
    results = []
    for packed in (True, False):
        leaves = [x.clone().requires_grad_() for x in (*tensors, scale)]
        *features, log_scale = leaves

        def attend(query, key, value, log_scale, mask, offsets=None):
            return linear_attention(
                query,
                key,
                value,
                key_log_scale=log_scale if scaled else None,
                key_mask=mask,
                offsets=offsets,
                **options,
            )

        if packed:
            output = attend(*features, log_scale, mask, offsets_of(lengths))
        else:
            pieces = [x.split(lengths, dim=2) for x in leaves] + [mask.split(lengths, dim=1)]
            output = torch.cat([attend(*piece) for piece in zip(*pieces, strict=True) if piece[0].shape[2]], dim=2)
        (output * weight).sum().backward()
        results.append((output, [x.grad for x in leaves]))
    (packed, packed_grads), (alone, alone_grads) = results
    assert packed.shape == (1, H, n, E)
    assert_close(packed, alone, rtol=1e-9, atol=1e-9)
    assert_close(packed_grads, alone_grads, rtol=1e-8, atol=1e-9)


@every_length
@pytest.mark.parametrize(
    "options",
    [
        {"rotary": Rotary()},
        {"rotary": Rotary(), "rotary_placement": "before"},
        {"feature_map": FavorPlus},
        {"feature_map": lambda d: CosFormer(d, max_positions=70, floor=1e-3)},
        {"causal": False},
        {"normalizer": "rms"},
    ],
    ids=["numerator", "before", "favor", "cosformer", "all at once", "rms"],
)
def test_the_layer_packed_equals_the_layer_apart(lengths, options):
    """Positions count from 0 in each sequence: cosFormer's last one would be refused past 70."""
    torch.manual_seed(0)
    layer = LinearAttention(12, H, **options).double()
    x = torch.randn(1, sum(lengths), 12, dtype=torch.float64)
    assert_close(layer(x, offsets=offsets_of(lengths)), apart(layer, [x], lengths, 1), rtol=1e-9, atol=1e-9)


def test_positions_that_are_given_are_kept():
    torch.manual_seed(0)
    layer = LinearAttention(12, H, rotary=Rotary(), rotary_placement="before").double()
    x = torch.randn(1, 7, 12, dtype=torch.float64)
    positions = torch.tensor([5, 6, 9, 0, 3, 4, 8])
    packed = layer(x, offsets=torch.tensor([0, 3, 7]), positions=positions)
    alone = torch.cat((layer(x[:, :3], positions=positions[:3]), layer(x[:, 3:], positions=positions[3:])), 1)
    assert_close(packed, alone, rtol=1e-9, atol=1e-9)


def test_positions_restart_at_each_offset():
    assert packed_positions(torch.tensor([0, 3, 3, 5])).tolist() == [0, 1, 2, 0, 1]


def test_no_tokens_at_all():
    layer = LinearAttention(12, H)
    assert layer(torch.zeros(1, 0, 12), offsets=torch.tensor([0, 0])).shape == (1, 0, 12)


def test_a_sequence_of_another_row_changes_nothing():
    torch.manual_seed(0)
    layer = LinearAttention(12, H, feature_map=EluPlusOne, rotary=Rotary())
    x = torch.randn(1, 9, 12)
    changed = x.clone()
    changed[:, 4:] = 1e3
    offsets = torch.tensor([0, 4, 9])
    assert torch.equal(layer(changed, offsets=offsets)[:, :4], layer(x, offsets=offsets)[:, :4])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3], "rise from 0 to the number of tokens, 7"),
        ([1, 7], "rise from 0"),
        ([0, 5, 4, 7], r"rise from 0 to the number of tokens, 7, got \[0, 5, 4, 7\]"),
        ([0], r"whole numbers \(p \+ 1,\)"),
        ([[0, 7]], r"whole numbers \(p \+ 1,\)"),
        ([0.0, 7.0], "whole numbers"),
    ],
)
def test_offsets_that_cut_nothing_sensible_are_refused(offsets, message):
    with pytest.raises(ValueError, match=message):
        LinearAttention(12, H)(torch.zeros(1, 7, 12), offsets=torch.tensor(offsets))


def test_more_rows_and_another_context_are_refused():
    layer = LinearAttention(12, H, causal=False)
    with pytest.raises(ValueError, match="b must be 1 with offsets, got 2"):
        layer(torch.zeros(2, 7, 12), offsets=torch.tensor([0, 7]))
    with pytest.raises(ValueError, match="attend to themselves, got 5 keys and 7 queries"):
        layer(torch.zeros(1, 7, 12), torch.zeros(1, 5, 12), offsets=torch.tensor([0, 7]))
