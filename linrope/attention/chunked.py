"""Causal linear attention in chunks: plain torch matrix products, any device, linear in length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from linrope.attention.state import Inputs, State, Sums


def chunked(inputs: Inputs, state: State, chunk_size: int, *, divides: bool) -> tuple[Sums, State]:
    """Scores within a chunk of c tokens, the running state between chunks.

    For the tokens t of a chunk that begins with the sums (S, z) of all earlier chunks:

        numerator_t  = Σ_{s≤t in chunk} W_ts (R_t φ(q_t))·(R_s φ(k_s)) v_s + r_t (R_t φ(q_t)) S
        normalizer_t = Σ_{s≤t in chunk} W_ts      φ(q_t) ·     φ(k_s)      + r_t      φ(q_t)·z

    with W_ts = exp(c_s - m_t), r_t = exp(m_begin - m_t) and m the running maximum of the keys'
    log-scales c; all ones where keys carry none. The maximum runs over the past alone.
    """
    n = inputs.query.shape[2]
    c = min(chunk_size, n)
    padding = -n % c
    tokens = inputs[:5] if padding == 0 else (pad(x, (0, 0, 0, padding)) for x in inputs[:5])
    query, key, rotated_query, rotated_key, value = (rearrange(x, "b h (g c) m -> b h g c m", c=c) for x in tokens)
    weights = None if inputs.log_scale is None else _weights(inputs.log_scale, state.log_scale, c)

    keys = (rotated_key, key) if weights is None else (rotated_key * weights.closing, key * weights.closing)
    kv, last_kv = _prefix(state.kv, keys[0].mT @ value, weights)
    key_sum, last_key_sum = _prefix(state.key_sum, keys[1].sum(-2), weights)

    scores = _weighed(rotated_query @ rotated_key.mT, weights)
    between = rotated_query @ kv
    numerator = scores @ value + (between if weights is None else between * weights.carried[..., None])
    normalizer = None
    if divides:
        plain = scores if inputs.rotated_query is inputs.query else _weighed(query @ key.mT, weights)
        between = (query @ key_sum[..., None])[..., 0]
        normalizer = plain.sum(-1) + (between if weights is None else between * weights.carried)
        normalizer = rearrange(normalizer, "b h g c -> b h (g c)")[:, :, :n]
    last_scale = state.log_scale if weights is None else weights.last_scale
    return (
        Sums(rearrange(numerator, "b h g c e -> b h (g c) e")[:, :, :n], normalizer),
        State(last_kv, last_key_sum, state.position, last_scale),
    )


class _Weights(NamedTuple):
    """How the keys' log-scales weigh, each a factor of at most 1."""

    inside: Float[Tensor, "b h g c c"]  # W: of key s for query t of the same chunk, 0 for later keys
    carried: Float[Tensor, "b h g c"]  # r: of the sums of all earlier chunks, for query t
    closing: Float[Tensor, "b h g c 1"]  # of key s in the sums at the end of its chunk
    decay: Float[Tensor, "b h g"]  # of the sums of all earlier chunks, at the end of a chunk
    last_scale: Float[Tensor, "b h"]  # the maximum after the last chunk


def _weights(log_scale: Float[Tensor, "b h n"], first: Float[Tensor, "b h"], c: int) -> _Weights:
    scale = pad(log_scale, (0, -log_scale.shape[-1] % c), value=torch.finfo(log_scale.dtype).min)
    top = torch.maximum(scale.detach().cummax(-1).values, first[..., None])
    scale, top = (rearrange(x, "b h (g c) -> b h g c", c=c) for x in (scale, top))
    end = top[..., -1]
    begin = torch.cat((first[..., None], end[..., :-1]), dim=-1)
    future = torch.ones(c, c, dtype=torch.bool, device=top.device).triu(1)
    return _Weights(
        # Masked before exp: a later key's scale may exceed the maximum so far without bound.
        inside=(scale[..., None, :] - top[..., None]).masked_fill(future, -torch.inf).exp(),
        carried=(begin[..., None] - top).exp(),
        closing=(scale - end[..., None]).exp()[..., None],
        decay=(begin - end).exp(),
        last_scale=end[..., -1],
    )


def _weighed(scores: Tensor, weights: _Weights | None) -> Tensor:
    """Scores of a chunk with its causal mask, and the keys' scales."""
    return scores.tril() if weights is None else scores * weights.inside


def _prefix(first: Tensor, parts: Tensor, weights: _Weights | None) -> tuple[Tensor, Tensor]:
    """Sum of all earlier chunks for each of the chunks in axis 2, and the sum of all.

    A loop of additions: cumsum along an axis that is not the last is several times slower.
    """
    sums, running = [], first
    for g, part in enumerate(parts.unbind(2)):
        sums.append(running)
        if weights is not None:
            running = running * weights.decay[:, :, g].reshape(*first.shape[:2], *(1,) * (first.ndim - 2))
        running = running + part
    return torch.stack(sums, dim=2), running
