"""Fewer heads of keys and values than of queries."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from linrope import FavorPlus, Hedgehog, LinearAttention, Rotary

D, H = 24, 4


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"rotary": Rotary()}, {"feature_map": FavorPlus}, {"feature_map": Hedgehog}])
def test_grouped_heads_equal_whole_ones_whose_keys_and_values_are_repeated(kv_heads, options):
    torch.manual_seed(0)
    grouped = LinearAttention(D, H, num_kv_heads=kv_heads, bias=True, **options).double()
    whole = LinearAttention(D, H, bias=True, **options).double()
    state = grouped.state_dict()
    for name in ("key.weight", "key.bias", "value.weight", "value.bias"):
        heads = state[name].unflatten(0, (kv_heads, D // H))
        state[name] = heads.repeat_interleave(H // kv_heads, dim=0).flatten(0, 1)
    whole.load_state_dict(state)
    assert grouped.key.out_features == grouped.value.out_features == kv_heads * D // H
    x = torch.randn(2, 9, D, dtype=torch.float64)
    assert_close(grouped(x), whole(x), rtol=1e-10, atol=1e-10)
    first, memory = grouped.stream(x[:, :4])
    rest, _ = grouped.stream(x[:, 4:], memory)
    assert_close(torch.cat((first, rest), dim=1), whole(x), rtol=1e-10, atol=1e-10)
    grouped(x).square().sum().backward()
    whole(x).square().sum().backward()
    summed = whole.key.weight.grad.unflatten(0, (kv_heads, H // kv_heads, D // H)).sum(1).flatten(0, 1)
    assert_close(grouped.key.weight.grad, summed, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kv_heads", [0, 3, 8, -1])
def test_heads_that_do_not_divide_are_refused(kv_heads):
    with pytest.raises(ValueError, match=f"num_kv_heads must divide num_heads, got {kv_heads} and 4"):
        LinearAttention(D, H, num_kv_heads=kv_heads)
    if kv_heads > 0:
        kernel = LinearAttention(D, H).kernel
        query = torch.zeros(1, H, 5, D // H)
        other = torch.zeros(1, kv_heads, 5, D // H)
        with pytest.raises(ValueError, match=f"must divide those of queries, got {kv_heads} and 4"):
            kernel(query, other, other)
