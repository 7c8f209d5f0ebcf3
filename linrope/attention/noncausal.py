"""Linear attention without a causal mask: one sum over all keys."""

from __future__ import annotations

from linrope.attention.state import Inputs, Sums


def noncausal(inputs: Inputs, *, divides: bool) -> Sums:
    """numerator_t = (R_t φ(q_t)) Σ_s (R_s φ(k_s)) v_sᵀ and normalizer_t = φ(q_t)·Σ_s φ(k_s)."""
    key, rotated_key = inputs.key, inputs.rotated_key
    if inputs.log_scale is not None:
        top = inputs.log_scale.detach().amax(-1, keepdim=True)
        weight = (inputs.log_scale - top).exp()[..., None]
        key, rotated_key = key * weight, rotated_key * weight
    numerator = inputs.rotated_query @ (rotated_key.mT @ inputs.value)
    normalizer = (inputs.query @ key.sum(-2)[..., None])[..., 0] if divides else None
    return Sums(numerator, normalizer)
