"""Linear attention as pure functions of mapped queries, mapped keys and values."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linrope.attention.backends import Backend, choose
from linrope.attention.chunked import chunked
from linrope.attention.decay import DecayPlacement, check_decay, decayed, forgets
from linrope.attention.inputs import Inputs, Normalizer, Rotate, check, check_positions, compute_dtype, prepare
from linrope.attention.noncausal import noncausal
from linrope.attention.packing import apart, check_offsets, packed_positions
from linrope.attention.plain import plain
from linrope.attention.reference import reference
from linrope.attention.state import State, check_state, empty_state, rms_norm
from linrope.attention.step import step
from linrope.precision import full_precision
from linrope.rotary import check_streams
from linrope.transforms import is_transformed

__all__ = ["Backend", "DecayPlacement", "Normalizer", "State", "linear_attention", "stream_linear_attention"]

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
    rotary: Rotate | None = None,
    causal: bool = True,
    key_mask: Bool[Tensor, "b s"] | None = None,
    query_positions: Int[Tensor, "*b n"] | None = None,
    key_positions: Int[Tensor, "*b s"] | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
    key_log_scale: Float[Tensor, "b h s"] | None = None,
    normalizer: Normalizer = "features",
    offsets: Int[Tensor, " p+1"] | None = None,
    log_decay: Float[Tensor, " h"] | None = None,
    decay_placement: DecayPlacement = "both",
) -> Float[Tensor, "b h n e"]:
    """Attend with the kernel φ(q)·φ(k), rotating in the numerator alone.

        out_t = Σ_s (R_t φ(q_t))·(R_s φ(k_s)) v_s / Σ_s φ(q_t)·φ(k_s)

    over the keys s ≤ t (``causal``) or all of them, as far as ``key_mask`` allows. A row with no key
    to attend to is 0. Sums are float32 or wider whatever the inputs.

    Args:
        query_features: φ(q).
        key_features: φ(k).
        value: Values; e need not equal m.
        rotary: A :class:`linrope.Rotation`, such as :class:`linrope.Rotary`, or any ``(features, positions) -> features``; None: no rotation.
        causal: Whether a token attends to itself and earlier tokens alone; then n = s.
        key_mask: True where a key takes part.
        query_positions: In tokens, ``(n,)`` or ``(b, n)``; 0, 1, … by default.
        key_positions: In tokens, ``(s,)`` or ``(b, s)``; those of the queries if causal, else 0, 1, ….
        chunk_size: Tokens per block of the causal form; changes speed and memory, not the result.
        backend: ``"native"`` (compiled C, for the CPU), ``"chunked"`` (torch, any device), ``"reference"``
            (float64, quadratic memory), or ``"auto"``: what ``$LINROPE_BACKEND`` says, else native where it
            can be had and chunked elsewhere, and where torch.func or an exporter is at work. One token alone
            goes by the recurrence, in torch, whatever the backend but reference.
        key_log_scale: Logarithm of a factor that each key's features still lack; see
            :meth:`linrope.FeatureMap.scaled_key`.
        normalizer: ``"features"`` divides by Σ_s φ(q_t)·φ(k_s), as above, which must not come near 0;
            ``"rms"`` divides the numerator by √(its mean square over e + 1e-6) instead, as TransNormer
            does (without 1e-6 where keys carry log-scales, which leave it no size), and None by
            nothing: for kernels that can be 0 or negative.
        offsets: Sequences packed into one row, b = 1: number i is the tokens from ``offsets[i]`` to
            ``offsets[i + 1]``, attends to itself alone, and counts its positions from 0. Some may be empty.
        log_decay: ln λ of each head, at most 0: a key at distance p, in tokens, counts λ^p as much. Causal alone; meant
            for positions that rise, for one behind its query counts more.
        decay_placement: Whether it counts less in ``"both"`` sums or in the ``"numerator"`` alone, beside a normalizer
            that forgets nothing. Where nothing divides by the normalizer, they are the same.

    Returns:
        The outputs, in the dtype of ``value``.

    Raises:
        ValueError: Shapes, dtypes or options that do not fit; the message says what was expected.

    Source: Su et al. 2021 (arXiv 2104.09864), eq. 19.
    """
    check(query_features, key_features, value, key_mask, chunk_size, key_log_scale, normalizer)
    n, s = query_features.shape[2], key_features.shape[2]
    if causal and n != s:
        raise ValueError(
            f"causal attention needs as many keys as queries, got {s} keys and {n} queries; "
            "pass causal=False, or stream_linear_attention to go on from a state"
        )
    if offsets is not None:
        if n != s:
            raise ValueError(f"packed sequences attend to themselves, got {s} keys and {n} queries")
        check_offsets(offsets, query_features.shape[0], n)
        query_positions = packed_positions(offsets) if query_positions is None else query_positions
        key_positions = query_positions if key_positions is None else key_positions
    check_decay(log_decay, decay_placement, rotary, query_features, causal=causal)
    if causal and key_positions is None:
        key_positions = query_positions
    check_positions("query_positions", query_positions, query_features)
    check_positions("key_positions", key_positions, key_features)
    if offsets is not None and n:
        return _packed(
            offsets,
            [query_features, key_features, value],
            [query_positions, key_positions, key_mask, key_log_scale],
            {
                "rotary": rotary,
                "causal": causal,
                "chunk_size": chunk_size,
                "backend": backend,
                "normalizer": normalizer,
                "log_decay": log_decay,
                "decay_placement": decay_placement,
            },
        )
    with full_precision(query_features.device):
        inputs = prepare(
            query_features, key_features, value, rotary, key_mask, query_positions, key_positions, key_log_scale
        )
        backend = choose(backend, inputs.query.dtype, inputs.query.device.type)
        if n == 0 or s == 0:
            return value.new_zeros(*query_features.shape[:3], value.shape[-1])
        state = empty_state(
            inputs.query,
            inputs.value,
            has_log_scale=key_log_scale is not None or forgets(log_decay, rotary, inputs.query.shape[-1]),
        )
        decay = log_decay, decay_placement
        output, _ = _attend(inputs, state, causal, chunk_size, backend, normalizer, decay)
        return output.to(value.dtype)


def stream_linear_attention(
    query_features: Float[Tensor, "b h n m"],
    key_features: Float[Tensor, "b h n m"],
    value: Float[Tensor, "b h n e"],
    state: State | None = None,
    *,
    rotary: Rotate | None = None,
    key_mask: Bool[Tensor, "b n"] | None = None,
    query_positions: Int[Tensor, "*b n"] | None = None,
    key_positions: Int[Tensor, "*b n"] | None = None,
    chunk_size: int | None = None,
    backend: Backend = "auto",
    key_log_scale: Float[Tensor, "b h n"] | None = None,
    normalizer: Normalizer = "features",
    log_decay: Float[Tensor, " h"] | None = None,
    decay_placement: DecayPlacement = "both",
) -> tuple[Float[Tensor, "b h n e"], State]:
    """Causal :func:`linear_attention` that goes on from the ``state`` of the tokens before.

    Any number of tokens at a time gives the same outputs. The given state is left as it is, so several
    continuations may start from it.

    Args:
        query_features: φ(q) of the next tokens.
        key_features: φ(k) of the next tokens.
        value: Values of the next tokens.
        state: What an earlier call returned; None before the first token. Its sums and
            ``key_log_scale`` belong together: give log-scales in all calls or in none, and the same decay.
        rotary: As in :func:`linear_attention`.
        key_mask: As in :func:`linear_attention`.
        query_positions: In tokens; by default they go on from ``state.position``.
        key_positions: In tokens; those of the queries by default.
        chunk_size: As in :func:`linear_attention`.
        backend: As in :func:`linear_attention`.
        key_log_scale: As in :func:`linear_attention`.
        normalizer: As in :func:`linear_attention`.
        log_decay: As in :func:`linear_attention`; the state's sums are relative to the last key.
        decay_placement: As in :func:`linear_attention`.

    Returns:
        The outputs, in the dtype of ``value``, and the state after the last token. Its position is one
        past the last key's, whether or not that key is masked.

    Raises:
        ValueError: As in :func:`linear_attention`, the state is of other shapes, or the rotation depends on the length
            of the text, which a stream does not know.
    """
    check_streams(rotary)
    check_decay(log_decay, decay_placement, rotary, query_features, causal=True)
    check(query_features, key_features, value, key_mask, chunk_size, key_log_scale, normalizer)
    b, _, n, _ = query_features.shape
    if key_features.shape[2] != n:
        raise ValueError(f"streaming needs as many keys as queries, got {key_features.shape[2]} keys and {n} queries")
    with full_precision(query_features.device):
        dtype = compute_dtype(query_features, key_features, value)
        if state is None:
            has_log_scale = key_log_scale is not None or forgets(log_decay, rotary, query_features.shape[-1])
            state = empty_state(query_features.to(dtype), value, has_log_scale=has_log_scale)
        check_state(state, query_features, value)
        if query_positions is None:
            query_positions = state.position[:, None] + torch.arange(n, device=state.position.device)
        if key_positions is None:
            key_positions = query_positions
        check_positions("query_positions", query_positions, query_features)
        check_positions("key_positions", key_positions, key_features)
        if key_positions.is_floating_point():
            raise ValueError(
                f"a state's position is a whole number, so key_positions must be, got {key_positions.dtype}"
            )
        inputs = prepare(
            query_features, key_features, value, rotary, key_mask, query_positions, key_positions, key_log_scale
        )
        backend = choose(backend, inputs.query.dtype, inputs.query.device.type)
        if n == 0:
            return torch.zeros_like(value), state
        sums = (x.to(dtype) for x in (state.kv, state.key_sum, state.log_scale))
        if not torch.is_inference_mode_enabled():  # a training step may go on from a state of inference
            sums = (x.clone() if x.is_inference() else x for x in sums)
        kv, key_sum, log_scale = sums
        wide = State(kv, key_sum, state.position, log_scale)
        decay = log_decay, decay_placement
        output, new_state = _attend(inputs, wide, True, chunk_size, backend, normalizer, decay)
        position = (key_positions[..., -1].long() + 1).expand(b).clone()
    return output.to(value.dtype), new_state._replace(position=position)


def _packed(
    offsets: Tensor, features: list[Tensor], by_token: list[Tensor | None], options: dict[str, Any]
) -> Float[Tensor, "1 h n e"]:
    """:func:`linear_attention` within each sequence, its positions, key mask and log-scales dealt out with it."""
    query_positions, key_positions, key_mask, log_scale = by_token
    n = features[0].shape[2]
    # As (1, 1, n), to be dealt out as features are.
    ones = [torch.as_tensor(x).reshape(1, 1, n) for x in (query_positions, key_positions)]
    ones.append(torch.ones(1, 1, n, dtype=torch.bool, device=offsets.device) if key_mask is None else key_mask[:, None])

    def attend(parts: list[Tensor], mask: Tensor) -> Tensor:
        query, key, value, query_at, key_at, valid, *scale = parts
        return linear_attention(
            query,
            key,
            value,
            query_positions=query_at[:, 0],
            key_positions=key_at[:, 0],
            key_mask=valid[:, 0] & mask,
            key_log_scale=scale[0] if scale else None,
            **options,
        )

    return apart(offsets, attend, [*features, *ones, *([] if log_scale is None else [log_scale])])


def _attend(
    inputs: Inputs,
    state: State,
    causal: bool,
    chunk_size: int | None,
    backend: Backend,
    normalizer: Normalizer,
    decay: tuple[Tensor | None, DecayPlacement],
) -> tuple[Tensor, State]:
    """Numerators, divided by what ``normalizer`` says, and the state after the last token."""

    def path(inputs: Inputs, state: State, divides: bool = False) -> tuple[Tensor, State]:
        if backend == "reference":
            return reference(inputs, state, causal=causal, divides=divides)
        if not causal:
            return noncausal(inputs, divides=divides), state
        if inputs.query.shape[2] == 1:
            return step(inputs, state, divides=divides)
        if backend == "native":
            from linrope.attention.native import native

            return native(inputs, state, divides=divides)
        in_chunks = plain if is_transformed() else chunked
        return in_chunks(inputs, state, chunk_size or _CHUNK_SIZE, divides=divides)

    divides = normalizer == "features"
    if forgets(decay[0], inputs.rotary, inputs.query.shape[-1]):
        output, state = decayed(inputs, state, *decay, path, divides=divides)
    else:
        output, state = path(inputs, state, divides)
    if normalizer == "rms":
        output = rms_norm(output, RMS_EPSILON if inputs.log_scale is None else 0.0)
    return output, state
