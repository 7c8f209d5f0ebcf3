"""Causal linear attention of one more token: the recurrence itself."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.attention.inputs import Inputs
from linrope.attention.state import State, divide
from linrope.rotary import turn_pairs


def step(inputs: Inputs, state: State, *, divides: bool) -> tuple[Tensor, State]:
    """Output of the token, and the state after it.

        S = e^(l - m) S + e^(c - m) (R φ(k)) vᵀ,  z = e^(l - m) z + e^(c - m) φ(k),  out = (R φ(q)) S / φ(q)·z

    with l the state's log-scale, c the key's and m the larger of both; all 0 where keys carry none.
    """
    turns = inputs.turns()
    query, key = inputs.rotated() if turns is None else map(turn_pairs, (inputs.query, inputs.key), turns)
    added, added_key, last_scale = key.mT * inputs.value, inputs.key[:, :, 0], state.log_scale
    kv, key_sum = state.kv, state.key_sum
    if inputs.log_scale is not None:
        scale = inputs.log_scale[..., 0]
        last_scale = torch.maximum(scale, state.log_scale).detach()
        kept, weight = ((x - last_scale).exp()[..., None] for x in (state.log_scale, scale))
        kv, key_sum = kv * kept[..., None], key_sum * kept
        added, added_key = added * weight[..., None], added_key * weight
    kv, key_sum = kv + added, key_sum + added_key
    output = query @ kv
    if divides:
        output = divide(output, (inputs.query @ key_sum[..., None])[..., 0])
    return output, State(kv, key_sum, state.position, last_scale)
