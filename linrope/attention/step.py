"""Causal linear attention of one more token: the recurrence itself."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.attention.inputs import Inputs
from linrope.attention.state import State, divide


def step(inputs: Inputs, state: State, *, divides: bool) -> tuple[Tensor, State]:
    """Output of the token, and the state after it.

        S = e^(l - m) S + e^(c - m) (R φ(k)) vᵀ,  z = e^(l - m) z + e^(c - m) φ(k),  out = (R φ(q)) S / φ(q)·z

    with l the state's log-scale, c the key's and m the larger of both; all 0 where keys carry none.
    """
    query, rotated_key = inputs.rotated()
    key, kv, key_sum, last_scale = inputs.key, state.kv, state.key_sum, state.log_scale
    if inputs.log_scale is not None:
        scale = inputs.log_scale[..., 0]
        last_scale = torch.maximum(scale, state.log_scale).detach()
        kept, weight = ((x - last_scale).to(kv.dtype).exp()[..., None] for x in (state.log_scale, scale))
        kv, key_sum = kv * kept[..., None], key_sum * kept
        rotated_key, key = rotated_key * weight[..., None], key * weight[..., None]
    kv = torch.addcmul(kv, rotated_key.mT, inputs.value)  # in one pass over what is large
    key_sum = key_sum + key[:, :, 0]
    output = query @ kv
    if divides:
        output = divide(output, (inputs.query @ key_sum[..., None])[..., 0])
    return output, State(kv, key_sum, state.position, last_scale)
