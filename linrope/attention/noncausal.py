"""Linear attention without a causal mask: one sum over all keys."""

from __future__ import annotations

from torch import Tensor

from linrope.attention.inputs import Inputs
from linrope.attention.state import divide


def noncausal(inputs: Inputs, *, divides: bool) -> Tensor:
    """(R_t φ(q_t)) Σ_s (R_s φ(k_s)) v_sᵀ, divided by φ(q_t)·Σ_s φ(k_s)."""
    key, (rotated_query, rotated_key) = inputs.key, inputs.rotated()
    if inputs.log_scale is not None:
        top = inputs.log_scale.detach().amax(-1, keepdim=True)
        weight = (inputs.log_scale - top).exp()[..., None]
        key, rotated_key = key * weight, rotated_key * weight
    numerator = rotated_query @ (rotated_key.mT @ inputs.value)
    return divide(numerator, (inputs.query @ key.sum(-2)[..., None])[..., 0]) if divides else numerator
