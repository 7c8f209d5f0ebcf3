"""What every backend receives, and what is refused before."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linrope.attention.state import NO_KEY
from linrope.rotary import Rotation, turn_pairs

Normalizer = Literal["features", "rms"] | None
Rotate = Callable[[Tensor, Tensor], Tensor]


class Inputs(NamedTuple):
    """Checked, masked, and in one dtype of float32 or wider; not rotated yet.

    Attributes:
        query: φ(q).
        key: φ(k), 0 where masked.
        value: Values, 0 where masked.
        log_scale: Logarithm of a factor that each key still lacks, ``NO_KEY`` where masked; None: none.
        rotary: What turns features in the numerator; None: nothing.
        query_positions: ``(n,)`` or ``(b, n)``; None: 0, 1, ….
        key_positions: ``(s,)`` or ``(b, s)``; None: 0, 1, ….
        seq_len: Length of each text, where the rotation depends on it.
        key_mask: True where a key takes part; None: everywhere.
    """

    query: Float[Tensor, "b h n m"]
    key: Float[Tensor, "b h s m"]
    value: Float[Tensor, "b h s e"]
    log_scale: Float[Tensor, "b h s"] | None
    rotary: Rotate | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    seq_len: Float[Tensor, "*b"] | None = None
    key_mask: Bool[Tensor, "b s"] | None = None

    def rotated(self) -> tuple[Float[Tensor, "b h n m"], Float[Tensor, "b h s m"]]:
        """Queries and keys, turned to their positions."""
        if self.rotary is None:
            return self.query, self.key
        if (turns := self.turns()) is not None:
            return turn_pairs(self.query, turns[0]), turn_pairs(self.key, turns[1])
        if isinstance(self.rotary, Rotation):
            length = {} if self.seq_len is None else {"seq_len": self.seq_len}
            query, key = (
                self.rotary(self.query, self.query_positions, **length),
                self.rotary(self.key, self.key_positions, **length),
            )
            return query, key
        query_at, key_at = (
            torch.arange(x.shape[2], device=x.device) if positions is None else positions
            for x, positions in ((self.query, self.query_positions), (self.key, self.key_positions))
        )
        return self.rotary(self.query, query_at), self.rotary(self.key, key_at)

    def turns(self) -> tuple[Float[Tensor, "#b #h n w"], Float[Tensor, "#b #h s w"]] | None:
        """Cosine and sine of each pair in turn, for queries and for keys; None where the rotation is no :class:`Rotation`
        of interleaved pairs, or has gradients.
        """
        rotary = self.rotary
        # Whoever turns in a way of their own has no such turns.
        if not isinstance(rotary, Rotation) or type(rotary).forward is not Rotation.forward:
            return None
        if rotary.pairing != "interleaved":
            return None
        query_turn = rotary.turns(self.query, self.query_positions, self.seq_len)
        if query_turn.requires_grad:
            return None
        if self.key_positions is self.query_positions and self.key.shape[2] == self.query.shape[2]:
            return query_turn, query_turn
        return query_turn, rotary.turns(self.key, self.key_positions, self.seq_len)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Widest dtype of the tensors, at least float32: a bfloat16 sum of ones stops at 256."""
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Rotate | None,
    key_mask: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    log_scale: Tensor | None,
) -> Inputs:
    """Widen and mask."""
    seq_len = None
    if isinstance(rotary, Rotation):
        seq_len = rotary.common_length(query, key, query_positions, key_positions, key_mask)
    dtype = compute_dtype(query, key, value)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    log_scale = None if log_scale is None else log_scale.to(dtype)
    if key_mask is not None:
        # After the map, for φ(0) is not 0; values too, for 0 · NaN is not 0.
        absent = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(absent, 0.0), value.masked_fill(absent, 0.0)
        if log_scale is not None:
            log_scale = log_scale.masked_fill(absent[..., 0], NO_KEY)
    return Inputs(query, key, value, log_scale, rotary, query_positions, key_positions, seq_len, key_mask)


def check_positions(name: str, positions: Tensor | None, features: Tensor) -> None:
    """Refuse positions that are not one for each token."""
    b, _, n, _ = features.shape
    if positions is not None and positions.shape not in ((n,), (b, n), (1, n)):
        raise ValueError(f"{name} must be (n,) = {(n,)} or (b, n) = {(b, n)}, got {tuple(positions.shape)}")


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    chunk_size: int | None,
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
    if normalizer not in ("features", "rms", None):
        raise ValueError(f"normalizer must be 'features', 'rms' or None, got {normalizer!r}")
    if normalizer is None and log_scale is not None:
        raise ValueError("normalizer=None divides nothing out, so it needs whole features, without key_log_scale")
