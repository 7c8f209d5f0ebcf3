"""Linear attention as pure functions of mapped queries, mapped keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linrope.attention.chunked import chunked
from linrope.attention.noncausal import noncausal
from linrope.attention.reference import reference
from linrope.attention.state import Inputs, State, Sums, divide, empty_state, rms_norm
from linrope.precision import full_precision

__all__ = ["Backend", "Normalizer", "State", "linear_attention", "stream_linear_attention"]

Backend = Literal["auto", "chunked", "reference"]
Normalizer = Literal["features", "rms"] | None
Rotation = Callable[[Tensor, Tensor], Tensor]

# Scores of a chunk cost c·(m + e) operations a token, its state 2·m·e; 64 balances them at usual widths.
_CHUNK_SIZE = 64
# Added to the mean square of numerators, as RMSNorms do: where rotated terms cancel, what is left is rounding.
# Features with log-scales have no size that it could be measured by, so there it is 0.
RMS_EPSILON = 1e-6


def linear_attention(
    query_features: Float[Tensor, "b h n m"],
    key_features: Float[Tensor, "b h s m"],
    value: Float[Tensor, "b h s e"],
    *,
    rotary: Rotation | None = None,
    causal: bool = True,
    key_mask: Bool[Tensor, "b s"] | None = None,
    query_positions: Int[Tensor, "*b n"] | None = None,
    key_positions: Int[Tensor, "*b s"] | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
    key_log_scale: Float[Tensor, "b h s"] | None = None,
    normalizer: Normalizer = "features",
) -> Float[Tensor, "b h n e"]:
    """Attend with the kernel φ(q)·φ(k), rotating in the numerator alone.

        out_t = Σ_s (R_t φ(q_t))·(R_s φ(k_s)) v_s / Σ_s φ(q_t)·φ(k_s)

    over the keys s ≤ t (``causal``) or all of them, as far as ``key_mask`` allows. A row with no key
    to attend to is 0. Sums are float32 or wider whatever the inputs.

    Args:
        query_features: φ(q).
        key_features: φ(k).
        value: Values; e need not equal m.
        rotary: A :class:`linrope.Rotary`, or any ``(features, positions) -> features``; None: no rotation.
        causal: Whether a token attends to itself and earlier tokens alone; then n = s.
        key_mask: True where a key takes part.
        query_positions: In tokens, ``(n,)`` or ``(b, n)``; 0, 1, … by default.
        key_positions: In tokens, ``(s,)`` or ``(b, s)``; those of the queries if causal, else 0, 1, ….
        chunk_size: Tokens per block of the causal form; changes speed and memory, not the result.
        backend: ``"chunked"``, ``"reference"`` (float64, quadratic memory) or ``"auto"``.
        key_log_scale: Logarithm of a factor that each key's features still lack; see
            :meth:`linrope.FeatureMap.scaled_key`.
        normalizer: ``"features"`` divides by Σ_s φ(q_t)·φ(k_s), as above, which must not come near 0;
            ``"rms"`` divides the numerator by √(its mean square over e + 1e-6) instead, as TransNormer
            does (without 1e-6 where keys carry log-scales, which leave it no size), and None by
            nothing: for kernels that can be 0 or negative.

    Returns:
        The outputs, in the dtype of ``value``.

    Raises:
        ValueError: Shapes, dtypes or options that do not fit; the message says what was expected.

    Source: Su et al. 2021 (arXiv 2104.09864), eq. 19.
    """
    _check(query_features, key_features, value, key_mask, chunk_size, backend, key_log_scale, normalizer)
    n, s = query_features.shape[2], key_features.shape[2]
    if causal and n != s:
        raise ValueError(
            f"causal attention needs as many keys as queries, got {s} keys and {n} queries; "
            "pass causal=False, or stream_linear_attention to go on from a state"
        )
    device = query_features.device
    if query_positions is None:
        query_positions = torch.arange(n, device=device)
    if key_positions is None:
        key_positions = query_positions if causal else torch.arange(s, device=device)
    _check_positions("query_positions", query_positions, query_features)
    _check_positions("key_positions", key_positions, key_features)
    if n == 0 or s == 0:
        return value.new_zeros(*query_features.shape[:3], value.shape[-1])
    with full_precision(device):
        inputs = _prepare(
            query_features,
            key_features,
            value,
            rotary,
            key_mask,
            query_positions,
            key_positions,
            key_log_scale,
        )
        state = empty_state(inputs.query, value, has_log_scale=key_log_scale is not None)
        divides = normalizer == "features"
        if backend == "reference":
            sums, _ = reference(inputs, state, causal=causal)
        elif causal:
            sums, _ = chunked(inputs, state, chunk_size or _CHUNK_SIZE, divides=divides)
        else:
            sums = noncausal(inputs, divides=divides)
        return _output(sums, normalizer, key_log_scale is not None).to(value.dtype)


def stream_linear_attention(
    query_features: Float[Tensor, "b h n m"],
    key_features: Float[Tensor, "b h n m"],
    value: Float[Tensor, "b h n e"],
    state: State | None = None,
    *,
    rotary: Rotation | None = None,
    key_mask: Bool[Tensor, "b n"] | None = None,
    query_positions: Int[Tensor, "*b n"] | None = None,
    key_positions: Int[Tensor, "*b n"] | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
    key_log_scale: Float[Tensor, "b h n"] | None = None,
    normalizer: Normalizer = "features",
) -> tuple[Float[Tensor, "b h n e"], State]:
    """Causal :func:`linear_attention` that goes on from the ``state`` of the tokens before.

    Any number of tokens at a time gives the same outputs. The given state is left as it is, so several
    continuations may start from it.

    Args:
        query_features: φ(q) of the next tokens.
        key_features: φ(k) of the next tokens.
        value: Values of the next tokens.
        state: What an earlier call returned; None before the first token. Its sums and
            ``key_log_scale`` belong together: give log-scales in all calls or in none.
        rotary: As in :func:`linear_attention`.
        key_mask: As in :func:`linear_attention`.
        query_positions: In tokens; by default they go on from ``state.position``.
        key_positions: In tokens; those of the queries by default.
        chunk_size: As in :func:`linear_attention`.
        backend: As in :func:`linear_attention`.
        key_log_scale: As in :func:`linear_attention`.
        normalizer: As in :func:`linear_attention`.

    Returns:
        The outputs, in the dtype of ``value``, and the state after the last token. Its position is one
        past the last key's, whether or not that key is masked.

    Raises:
        ValueError: As in :func:`linear_attention`, or the state is of other shapes.
    """
    _check(query_features, key_features, value, key_mask, chunk_size, backend, key_log_scale, normalizer)
    b, h, n, m = query_features.shape
    if key_features.shape[2] != n:
        raise ValueError(f"streaming needs as many keys as queries, got {key_features.shape[2]} keys and {n} queries")
    device = query_features.device
    with full_precision(device):
        dtype = _compute_dtype(query_features, key_features, value)
        if state is None:
            state = empty_state(query_features.to(dtype), value, has_log_scale=key_log_scale is not None)
        if state.kv.shape != (b, h, m, value.shape[-1]):
            raise ValueError(
                f"state.kv must be (b, h, m, e) = {(b, h, m, value.shape[-1])}, got {tuple(state.kv.shape)}"
            )
        if n == 0:
            return torch.zeros_like(value), state
        if query_positions is None:
            query_positions = state.position[:, None] + torch.arange(n, device=device)
        if key_positions is None:
            key_positions = query_positions
        _check_positions("query_positions", query_positions, query_features)
        _check_positions("key_positions", key_positions, key_features)
        inputs = _prepare(
            query_features,
            key_features,
            value,
            rotary,
            key_mask,
            query_positions,
            key_positions,
            key_log_scale,
        )
        wide = State(state.kv.to(dtype), state.key_sum.to(dtype), state.position, state.log_scale.to(dtype))
        if backend == "reference":
            sums, new_state = reference(inputs, wide, causal=True)
        else:
            sums, new_state = chunked(inputs, wide, chunk_size or _CHUNK_SIZE, divides=normalizer == "features")
        position = (key_positions[..., -1].long() + 1).expand(b).clone()
        output = _output(sums, normalizer, key_log_scale is not None)
    return output.to(value.dtype), new_state._replace(position=position)


def _output(sums: Sums, normalizer: Normalizer, has_log_scale: bool) -> Tensor:
    """Numerators, divided by what ``normalizer`` says."""
    if normalizer == "rms":
        return rms_norm(sums.numerator, 0.0 if has_log_scale else RMS_EPSILON)
    if normalizer is None or sums.normalizer is None:
        return sums.numerator
    return divide(sums.numerator, sums.normalizer)


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Widest dtype of the tensors, at least float32: a bfloat16 sum of ones stops at 256."""
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Rotation | None,
    key_mask: Tensor | None,
    query_positions: Tensor,
    key_positions: Tensor,
    log_scale: Tensor | None,
) -> Inputs:
    """Widen, mask and rotate."""
    dtype = _compute_dtype(query, key, value)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    log_scale = None if log_scale is None else log_scale.to(dtype)
    if key_mask is not None:
        # After the map, for φ(0) is not 0; values too, for 0 · NaN is not 0.
        absent = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(absent, 0.0), value.masked_fill(absent, 0.0)
        if log_scale is not None:
            log_scale = log_scale.masked_fill(absent[..., 0], torch.finfo(dtype).min)
    if rotary is None:
        return Inputs(query, key, query, key, value, log_scale)
    return Inputs(query, key, rotary(query, query_positions), rotary(key, key_positions), value, log_scale)


def _check_positions(name: str, positions: Tensor, features: Tensor) -> None:
    b, _, n, _ = features.shape
    if positions.shape not in ((n,), (b, n), (1, n)):
        raise ValueError(f"{name} must be (n,) = {(n,)} or (b, n) = {(b, n)}, got {tuple(positions.shape)}")


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    chunk_size: int | None,
    backend: str,
    log_scale: Tensor | None,
    normalizer: Normalizer,
) -> None:
    """Refuse what does not fit, saying what was expected and what came."""
    shapes = f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(
            f"query_features, key_features and value must be (b, h, n, m), (b, h, s, m), (b, h, s, e); {shapes}"
        )
    if not query.shape[:2] == key.shape[:2] == value.shape[:2]:
        raise ValueError(f"query_features, key_features and value must agree in batch and heads; {shapes}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query_features and key_features must have the same number of features; {shapes}")
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"key_features and value must have the same length; {shapes}")
    if not all(x.is_floating_point() for x in (query, key, value)):
        raise ValueError(f"features and values must be floating, got {query.dtype}, {key.dtype} and {value.dtype}")
    expected = (key.shape[0], key.shape[2])
    if key_mask is not None and (key_mask.shape != expected or key_mask.dtype != torch.bool):
        raise ValueError(
            f"key_mask must be bool of shape (b, s) = {expected}, True where a key takes part; "
            f"got {key_mask.dtype} of shape {tuple(key_mask.shape)}"
        )
    if log_scale is not None and log_scale.shape != key.shape[:3]:
        raise ValueError(f"key_log_scale must be (b, h, s) = {tuple(key.shape[:3])}, got {tuple(log_scale.shape)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if backend not in ("auto", "chunked", "reference"):
        raise ValueError(f"backend must be 'auto', 'chunked' or 'reference', got {backend!r}")
    if normalizer not in ("features", "rms", None):
        raise ValueError(f"normalizer must be 'features', 'rms' or None, got {normalizer!r}")
    if normalizer is None and log_scale is not None:
        raise ValueError("normalizer=None divides nothing out, so it needs whole features, without key_log_scale")
