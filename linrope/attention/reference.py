"""The truth that every other path is held to: explicit n × s matrices in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from linrope.attention.inputs import Inputs
from linrope.attention.state import State, divide


def reference(inputs: Inputs, state: State, *, causal: bool, divides: bool) -> tuple[Tensor, State]:
    """Linear attention as the paper writes it, and the sums it leaves.

        N[t,s] = (R_t φ(q_t))·(R_s φ(k_s)),  D[t,s] = φ(q_t)·φ(k_s),  out = (N∘W) V / (D∘W)·1

    W is the causal mask. Where keys carry log-scales c, W[t,s] = exp(c_s - max_{r≤t} c_r): the maximum
    is common to numerator and normalizer. The ``state`` counts as what all tokens attend to before.

    Source: Su et al. 2021 (arXiv 2104.09864), eq. 19.
    """
    dtype = inputs.query.dtype
    q, k, rq, rk, v = (x.double() for x in (inputs.query, inputs.key, *inputs.rotated(), inputs.value))
    kv, key_sum, scale = state.kv.double(), state.key_sum.double(), state.log_scale.double()[..., None]
    c = q.new_zeros(k.shape[:3]) if inputs.log_scale is None else inputs.log_scale.double()
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1) & causal
    log_weight = c[:, :, None, :].masked_fill(hidden, -torch.inf)
    top = torch.maximum(log_weight.amax(-1).detach(), scale)
    weight, carried = (log_weight - top[..., None]).exp(), (scale - top).exp()[..., None]

    # Filled as well as weighed by 0: what a hidden key holds may be infinite.
    rotated_scores, scores = ((x @ y.mT).masked_fill(hidden, 0.0) * weight for x, y in ((rq, rk), (q, k)))
    numerator = rotated_scores @ v + carried * (rq @ kv)
    normalizer = scores.sum(-1) + (carried * (q @ key_sum[..., None]))[..., 0]

    last, kept = weight[:, :, -1, :, None], carried[:, :, -1:]
    new_state = State(
        kv=((rk * last).mT @ v + kept * kv).to(dtype),
        key_sum=((k * last).sum(2) + kept[..., 0] * key_sum).to(dtype),
        position=state.position,
        log_scale=top[..., -1].to(state.log_scale.dtype),
    )
    return divide(numerator, normalizer) if divides else numerator, new_state
