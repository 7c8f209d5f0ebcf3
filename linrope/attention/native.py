"""Causal linear attention on the CPU by native.c, as operators that torch's compiler and exporter see.

Imported when it is first needed, for registering an operator takes torch a while.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from linrope.attention.build import library
from linrope.attention.inputs import Inputs
from linrope.attention.state import State, divide

CHUNK = 32  # as in native.c

# ---- what native.c takes ----

# The fields of native.c's `problem` behind its numbers, each of 8 bytes: a tensor is an address and three strides.
_TENSORS = (
    *("query", "key", "value", "out", "query_turn", "key_turn", "log_scale", "top", "inverse"),
    *("kv", "key_sum", "scale", "last_kv", "last_key_sum", "saved"),
    *("grad_out", "grad_query", "grad_key", "grad_value"),
    *("grad_kv", "grad_key_sum", "grad_last_kv", "grad_last_key_sum"),
)
_OUTPUTS = ("out", "last_kv", "last_key_sum", "top", "inverse", "saved")
_GRADIENTS = ("grad_query", "grad_key", "grad_value", "grad_kv", "grad_key_sum")


def _call(function: str, divides: bool, query: Tensor, value: Tensor, **others: Tensor | None) -> None:
    """Run one of native.c's two functions."""
    tensors = {"query": query, "value": value, **others}
    (b, h, n, m), e, turn = query.shape, value.shape[-1], tensors["query_turn"]
    # A thread works on one head at a time, and waking one takes as long as a few tokens do.
    threads = min(torch.get_num_threads(), b * h) if b * h * n * m * e > 2**20 else 1
    turned, scaled = 0 if turn is None else turn.shape[-1], tensors["log_scale"] is not None
    fields = [b, h, n, m, e, threads, turned, divides, scaled]
    kept = []  # copies must live until the call has returned
    for name in _TENSORS:
        x = tensors.get(name)
        if x is None or not x.numel():
            fields += (0, 0, 0, 0)
            continue
        kept.append(x if x.stride(-1) == 1 else x.contiguous())
        numbers = x.itemsize // query.itemsize  # of the query's in one of the tensor's
        fields += (kept[-1].data_ptr(), *(numbers * stride for stride in (*kept[-1].stride(), 0)[:3]))
    problem = (ctypes.c_int64 * len(fields))(*fields)
    if getattr(library(query.dtype), function)(problem):
        raise MemoryError(f"no memory for the buffers of linear attention with {m} features")


def _empty_rows_like(x: Tensor) -> Tensor:
    """Memory laid out as that of ``x`` if its last axis is contiguous then, which C relies on."""
    empty = torch.empty_like(x)
    return empty if empty.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


# ---- the operators that torch sees ----


@torch.library.custom_op("linrope::attend", mutates_args=(), device_types="cpu")
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_turn: Tensor | None,
    key_turn: Tensor | None,
    log_scale: Tensor | None,
    kv: Tensor,
    key_sum: Tensor,
    scale: Tensor,
    divides: bool,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Causal linear attention that goes on from a state.

    Args:
        query: φ(q), b h n m.
        key: φ(k), b h n m.
        value: b h n e.
        query_turn: Cosine and sine of each pair in turn, b h n w; None: no rotation.
        key_turn: The same for the keys.
        log_scale: Of the keys, b h n, float64, or None.
        kv: Of the state before the first token, b h m e.
        key_sum: The same, b h m.
        scale: The same, b h, float64.
        divides: Whether the output is divided by the normalizer.
        saves: Whether a backward pass will follow.

    Returns:
        The output b h n e, kv and key_sum after the last token, the running maximum of the log-scales
        b h n in float64, 1 / normalizer b h n, and the states before each chunk, as native.c lays them out.
    """
    outputs = _attend_shapes(query, key, value, query_turn, key_turn, log_scale, kv, key_sum, scale, divides, saves)
    _call(
        "forward",
        divides,
        **{"query": query, "key": key, "value": value, "query_turn": query_turn, "key_turn": key_turn},
        **{"log_scale": log_scale, "kv": kv, "key_sum": key_sum, "scale": scale},
        **dict(zip(_OUTPUTS, outputs, strict=True)),
    )
    return outputs


@attend.register_fake
def _attend_shapes(query, key, value, query_turn, key_turn, log_scale, kv, key_sum, scale, divides, saves):
    b, h, n, m = query.shape
    per_token = (b, h, n)
    state_size = m * _padded(value.shape[-1], value.dtype) + _padded(m, value.dtype)
    return (
        _empty_rows_like(value),
        torch.empty_like(kv, memory_format=torch.contiguous_format),
        torch.empty_like(key_sum, memory_format=torch.contiguous_format),
        query.new_empty(per_token if log_scale is not None else (0,), dtype=torch.float64),
        query.new_empty(per_token if divides else (0,)),
        query.new_empty((b, h, -(-n // CHUNK), state_size) if saves else (0,)),
    )


def _padded(width, dtype: torch.dtype):
    """``width`` rounded up as native.c may do: to a whole vector of the widest kind there is."""
    lanes = 64 // dtype.itemsize
    return -(-width // lanes) * lanes


@torch.library.custom_op("linrope::attend_backward", mutates_args=(), device_types="cpu")
def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_turn: Tensor | None,
    key_turn: Tensor | None,
    log_scale: Tensor | None,
    scale: Tensor,
    out: Tensor,
    top: Tensor,
    inverse: Tensor,
    saved: Tensor,
    divides: bool,
    grad_out: Tensor,
    grad_last_kv: Tensor | None,
    grad_last_key_sum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`attend` for query, key, value, kv and key_sum."""
    grads = _backward_shapes(query, key, value)
    _call(
        "backward",
        divides,
        **{"query": query, "key": key, "value": value, "query_turn": query_turn, "key_turn": key_turn},
        **{"log_scale": log_scale, "scale": scale, "out": out, "top": top, "inverse": inverse, "saved": saved},
        **{"grad_out": grad_out, "grad_last_kv": grad_last_kv, "grad_last_key_sum": grad_last_key_sum},
        **dict(zip(_GRADIENTS, grads, strict=True)),
    )
    return grads


@attend_backward.register_fake
def _backward_shapes(query, key, value, *_):
    b, h, _, m = query.shape
    kv, key_sum = query.new_empty(b, h, m, value.shape[-1]), query.new_empty(b, h, m)
    return _empty_rows_like(query), _empty_rows_like(key), _empty_rows_like(value), kv, key_sum


def _save(ctx, inputs, output):
    query, key, value, query_turn, key_turn, log_scale, _, _, scale, ctx.divides, saves = inputs
    out, _, _, top, inverse, saved = output
    if not saves:
        raise RuntimeError(
            "this call of the native backend cannot be differentiated: torch.func's transforms, and graphs exported "
            "without gradients, need backend='auto'"
        )
    ctx.save_for_backward(query, key, value, query_turn, key_turn, log_scale, scale, out, top, inverse, saved)


def _differentiate(ctx, grad_out, grad_last_kv, grad_last_key_sum, *_):
    query, key, value, query_turn, key_turn, log_scale, scale, out, top, inverse, saved = ctx.saved_tensors
    grads = attend_backward(
        *(query, key, value, query_turn, key_turn, log_scale, scale, out, top, inverse, saved),
        ctx.divides,
        torch.zeros_like(out) if grad_out is None else grad_out,
        grad_last_kv,
        grad_last_key_sum,
    )
    grad_query, grad_key, grad_value, grad_kv, grad_key_sum = grads
    # A log-scale is a factor of its key, exp(c): so dL/dc = k · dL/dk.
    grad_log_scale = None if log_scale is None else (grad_key * key).sum(-1).to(log_scale.dtype)
    return grad_query, grad_key, grad_value, None, None, grad_log_scale, grad_kv, grad_key_sum, None, None, None


attend.register_autograd(_differentiate, setup_context=_save)


# ---- the backend ----


def native(inputs: Inputs, state: State, *, divides: bool) -> tuple[Tensor, State]:
    """Outputs, divided by the normalizer where it ``divides``, and the state after the last token."""
    turns = inputs.turns()
    if inputs.rotary is None or turns is not None:
        return _native(inputs.query, inputs.key, inputs.value, inputs.log_scale, turns, state, divides)
    # A rotation that native.c does not know is done before, and the normalizer, which must not see it, is the
    # numerator of values that are all 1.
    numerator, new = _native(*inputs.rotated(), inputs.value, inputs.log_scale, None, state, False)
    ones = inputs.value.new_ones(*inputs.value.shape[:3], 1)
    key_sum = state._replace(kv=state.key_sum[..., None])
    normalizer, sums = _native(inputs.query, inputs.key, ones, inputs.log_scale, None, key_sum, False)
    return divide(numerator, normalizer[..., 0]) if divides else numerator, new._replace(key_sum=sums.kv[..., 0])


def _native(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_scale: Tensor | None,
    turns: tuple[Tensor, Tensor] | None,
    state: State,
    divides: bool,
) -> tuple[Tensor, State]:
    query_turn, key_turn = (None, None) if turns is None else (x.expand(*query.shape[:2], -1, -1) for x in turns)
    tensors = [x for x in (query, key, value, log_scale, state.kv, state.key_sum) if x is not None]
    saves = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if torch.autograd.forward_ad._current_level >= 0:  # torch takes an operator without a rule for constant
        raise NotImplementedError("the native backend knows no forward-mode gradients; use backend='auto'")
    # A log-scale has no gradient, and cloned it can be saved even where it comes from inference mode.
    scale = state.log_scale.detach().double().clone()
    log_scale = None if log_scale is None else log_scale.double()
    out, kv, key_sum, top, *_ = attend(
        *(query, key, value, query_turn, key_turn, log_scale, state.kv, state.key_sum, scale), divides, saves
    )
    return out, State(
        kv, key_sum, state.position, (scale if log_scale is None else top[..., -1]).to(state.log_scale.dtype)
    )
