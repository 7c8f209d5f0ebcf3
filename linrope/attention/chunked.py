"""Causal linear attention in chunks: plain torch matrix products on any device, linear in length.

Both directions are written out. Autograd would keep more, and pass over it more often.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from linrope.attention.inputs import Inputs
from linrope.attention.state import NO_KEY, State
from linrope.precision import full_precision
from linrope.rotary import turn_pairs


def chunked(inputs: Inputs, state: State, chunk_size: int, *, divides: bool) -> tuple[Tensor, State]:
    """Scores within a chunk of c tokens, the running state between chunks.

    For the tokens t of a chunk that begins with the sums (S, z) of all earlier chunks:

        numerator_t  = Σ_{s≤t in chunk} W_ts (R_t φ(q_t))·(R_s φ(k_s)) v_s + r_t (R_t φ(q_t)) S
        normalizer_t = Σ_{s≤t in chunk} W_ts      φ(q_t) ·     φ(k_s)      + r_t      φ(q_t)·z

    with W_ts = exp(c_s - m_t), r_t = exp(m_begin - m_t) and m the running maximum of the keys'
    log-scales c; all ones where keys carry none. The maximum runs over the past alone.
    """
    turns = inputs.turns()
    rotated = (None, None) if inputs.rotary is None or turns is not None else inputs.rotated()
    query_turn, key_turn = turns or (None, None)
    if key_turn is query_turn:  # compilers want no tensor twice
        key_turn = None
    output, kv, key_sum, log_scale = _Chunked.apply(
        *(inputs.query, inputs.key, *rotated, inputs.value, inputs.log_scale, query_turn, key_turn),
        *(state.kv, state.key_sum, state.log_scale, min(chunk_size, inputs.query.shape[2]), divides),
    )  # type: ignore[misc]
    return output, State(kv, key_sum, state.position, log_scale)


class _Chunked(torch.autograd.Function):
    """The two passes.

    A rotation comes as the turns of pairs, one for both where the keys' are not given, or as rotated queries and keys
    beside the others.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        rotated_query: Tensor | None,
        rotated_key: Tensor | None,
        value: Tensor,
        log_scale: Tensor | None,
        query_turn: Tensor | None,
        key_turn: Tensor | None,
        kv: Tensor,
        key_sum: Tensor,
        scale: Tensor,
        c: int,
        divides: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if query_turn is not None:
            key_turn = query_turn if key_turn is None else key_turn
            turned = turn_pairs(query, query_turn), turn_pairs(key, key_turn)
        else:
            turned = query if rotated_query is None else rotated_query, key if rotated_key is None else rotated_key
        q, k, v, rq, rk = (_in_chunks(x, c) for x in (query, key, value, *turned))
        weights = None if log_scale is None else _weigh(log_scale, scale, c, query.dtype)

        states, last_kv = _before(kv, _closing(rk, weights).mT @ v, weights)
        scores = _masked(rq @ rk.mT, weights)
        output = _add_product(_carried(rq @ states, weights), scores, v)
        key_sums, last_key_sum = _before(key_sum, _closing(k, weights).sum(-2), weights)
        inverse = None
        if divides:
            plain = scores if turned[0] is query else _masked(q @ k.mT, weights)
            normalizer = plain.sum(-1, keepdim=True) + _carried(q @ key_sums[..., None], weights)
            nothing = normalizer.abs() < torch.finfo(normalizer.dtype).tiny
            inverse = normalizer.masked_fill(nothing, 1.0).reciprocal_().masked_fill_(nothing, 0.0)
            output *= inverse
        ctx.save_for_backward(
            *(query_turn, key_turn, q, k, rq, rk, v, states, key_sums, scores, inverse, output), *(weights or ())
        )
        ctx.n, ctx.separate = query.shape[2], rotated_query is not None
        last_scale = scale if weights is None else weights.last_scale.to(scale.dtype)
        return _in_row(output, ctx.n), last_kv, last_key_sum, last_scale.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_kv: Tensor, grad_key_sum: Tensor, _: Tensor) -> tuple[Any, ...]:
        # With create_graph=True, what is computed around this call would have second derivatives, and this none.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "the chunked backend cannot be differentiated twice: use torch.func's transforms, or backend='reference'"
            )
        with full_precision(grad_output.device):
            return _Chunked._backward(ctx, grad_output, grad_kv, grad_key_sum)

    @staticmethod
    def _backward(ctx: Any, grad_output: Tensor, grad_kv: Tensor, grad_key_sum: Tensor) -> tuple[Any, ...]:
        query_turn, key_turn, q, k, rq, rk, v, states, key_sums, scores, inverse, output, *weights = ctx.saved_tensors
        weights = _Weights(*weights) if weights else None
        rotates = ctx.separate or query_turn is not None
        g = _in_chunks(grad_output, q.shape[3])
        delta = g.new_zeros(*g.shape[:-1], 1)  # gradients of the normalizer: output = inverse · numerator
        if inverse is not None:
            delta = (g * output).sum(-1, keepdim=True).mul_(inverse).neg_()
            g = g * inverse
        grad_scores = g @ v.mT
        grad_scores = _masked(grad_scores if rotates else grad_scores.add_(delta), weights)
        carried_g, carried_delta = _carried(g, weights), _carried(delta, weights)
        grad_states, grad_kv = _after(grad_kv, rq.mT @ carried_g, weights)
        grad_key_sums, grad_key_sum = _after(grad_key_sum, (q.mT @ carried_delta)[..., 0], weights)

        grad_rq = _add_product(carried_g @ states.mT, grad_scores, rk)
        grad_rk = _add_product(_closing(v, weights) @ grad_states.mT, grad_scores.mT, rq)
        grad_v = _add_product(_closing(rk, weights) @ grad_states, scores.mT, g)
        if ctx.separate:
            grad_q, grad_k = torch.zeros_like(q), torch.zeros_like(k)
        elif query_turn is None:
            grad_q, grad_k = grad_rq, grad_rk
        else:
            turns = query_turn, query_turn if key_turn is None else key_turn
            query_turn, key_turn = (_in_chunks(turn, q.shape[3]) for turn in turns)
            grad_q, grad_k = turn_pairs(grad_rq, query_turn, back=True), turn_pairs(grad_rk, key_turn, back=True)
        # The share of the normalizer, which sees what is not rotated.
        grad_q.addcmul_(carried_delta, key_sums[..., None, :])
        grad_k += _closing(grad_key_sums[..., None, :].expand_as(k), weights)
        if rotates and inverse is not None:
            grad_plain = _masked(delta.expand_as(scores).clone(), weights)
            grad_q = _add_product(grad_q, grad_plain, k)
            grad_k = _add_product(grad_k, grad_plain.mT, q)

        grad_log_scale = None
        if weights is not None:  # a log-scale is a factor of its key, exp(c): so dL/dc = k · dL/dk
            grad_log_scale = (grad_k * k).sum(-1)
            if ctx.separate:
                grad_log_scale += (grad_rk * rk).sum(-1)
            grad_log_scale = _in_row(grad_log_scale, ctx.n)
        rotated = (_in_row(grad_rq, ctx.n), _in_row(grad_rk, ctx.n)) if ctx.separate else (None, None)
        grad_query, grad_key, grad_value = (_in_row(x, ctx.n) for x in (grad_q, grad_k, grad_v))
        return (
            *(grad_query, grad_key, *rotated, grad_value, grad_log_scale, None, None),
            *(grad_kv, grad_key_sum, None, None, None),
        )


def _add_product(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """x + left @ right of each chunk, into the memory of ``x``."""
    return x.flatten(0, 2).baddbmm_(left.flatten(0, 2), right.flatten(0, 2)).unflatten(0, x.shape[:3])


def _in_chunks(x: Float[Tensor, "b h n x"], c: int) -> Float[Tensor, "b h g c x"]:
    """Tokens dealt out to chunks; zeros fill the last one."""
    padding = -x.shape[2] % c
    return (pad(x, (0, 0, 0, padding)) if padding else x).unflatten(2, (-1, c))


def _in_row(x: Tensor, n: int) -> Tensor:
    """Tokens in one row again, without the padding."""
    return x.flatten(2, 3)[:, :, :n]


class _Weights(NamedTuple):
    """How the keys' log-scales weigh, each a factor of at most 1."""

    inside: Float[Tensor, "b h g c c"]  # W: of key s for query t of the same chunk, 0 for later keys
    carried: Float[Tensor, "b h g c 1"]  # r: of the sums of all earlier chunks, for query t
    closing: Float[Tensor, "b h g c 1"]  # of key s in the sums at the end of its chunk
    decay: Float[Tensor, "b h g"]  # of the sums of all earlier chunks, at the end of a chunk
    last_scale: Float[Tensor, "b h"]  # the maximum after the last chunk


def _weigh(log_scale: Float[Tensor, "b h n"], first: Float[Tensor, "b h"], c: int, dtype: torch.dtype) -> _Weights:
    # Differences are taken in the dtype of the log-scales: those of a decay are large.
    scale = pad(log_scale, (0, -log_scale.shape[-1] % c), value=NO_KEY)
    top = torch.maximum(scale.cummax(-1).values, first[..., None])
    scale, top = scale.unflatten(-1, (-1, c)), top.unflatten(-1, (-1, c))
    end = top[..., -1]
    begin = torch.cat((first[..., None], end[..., :-1]), dim=-1)
    future = torch.ones(c, c, dtype=torch.bool, device=top.device).triu(1)
    return _Weights(
        # Masked before exp: a later key's scale may exceed the maximum so far without bound.
        inside=(scale[..., None, :] - top[..., None]).masked_fill(future, -torch.inf).to(dtype).exp(),
        carried=(begin[..., None] - top).to(dtype).exp()[..., None],
        closing=(scale - end[..., None]).to(dtype).exp()[..., None],
        decay=(begin - end).to(dtype).exp(),
        last_scale=end[..., -1],
    )


def _masked(scores: Tensor, weights: _Weights | None) -> Tensor:
    """Scores of a chunk with its causal mask, and the keys' scales."""
    return scores.tril_() if weights is None else scores.mul_(weights.inside)


def _carried(x: Tensor, weights: _Weights | None) -> Tensor:
    return x if weights is None else x * weights.carried


def _closing(x: Tensor, weights: _Weights | None) -> Tensor:
    return x if weights is None else x * weights.closing


def _before(first: Tensor, parts: Tensor, weights: _Weights | None) -> tuple[Tensor, Tensor]:
    """For each chunk in axis 2 the sum of what came before it, and the sum of all; overwrites ``parts``."""
    running = first
    for g, part in enumerate(parts.unbind(2)):
        running = part.add_(running if weights is None else running * _decay(weights, g, first))
    return torch.cat((first[:, :, None], parts[:, :, :-1]), dim=2), running.clone()


def _after(last: Tensor, parts: Tensor, weights: _Weights | None) -> tuple[Tensor, Tensor]:
    """For each chunk in axis 2 the sum of what comes after it, and the sum of all; overwrites ``parts``."""
    running = last
    for g, part in reversed(list(enumerate(parts.unbind(2)))):
        running = part.add_(running if weights is None else running * _decay(weights, g, last))
    return torch.cat((parts[:, :, 1:], last[:, :, None]), dim=2), running.clone()


def _decay(weights: _Weights, g: int, like: Tensor) -> Tensor:
    return weights.decay[:, :, g].reshape(*like.shape[:2], *(1,) * (like.ndim - 2))
