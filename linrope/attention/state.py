"""What causal linear attention remembers of the tokens it has seen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# The log-scale of no key at all. Not -inf: a row whose every key is masked must not form inf - inf. In float64
# float32's least number too, for ONNX writes its constants in float32.
NO_KEY = torch.finfo(torch.float32).min


class State(NamedTuple):
    """The running sums of causal linear attention: constant in size, float32 or wider.

    Where attention forgets with distance, each key counts as much as it does for its last one, before ``position``.

    Attributes:
        kv: Σ_s R_s φ(k_s) v_sᵀ exp(-log_scale).
        key_sum: Σ_s φ(k_s) exp(-log_scale), never rotated.
        position: Position of the next token, in tokens; rows of a batch may differ.
        log_scale: Logarithm of what the sums are divided by, the largest of the keys' log-scales
            so far; 0 where the keys carry none.
    """

    kv: Float[Tensor, "b h m e"]
    key_sum: Float[Tensor, "b h m"]
    position: Int[Tensor, " b"]
    log_scale: Float[Tensor, "b h"]


def empty_state(
    query_features: Float[Tensor, "b h n m"], value: Float[Tensor, "b h n e"], *, has_log_scale: bool
) -> State:
    """Return the state before the first token, in the dtype and on the device of the features."""
    b, h, _, m = query_features.shape
    zeros = query_features.new_zeros
    return State(
        kv=zeros(b, h, m, value.shape[-1]),
        key_sum=zeros(b, h, m),
        position=zeros(b, dtype=torch.long),
        log_scale=query_features.new_full((b, h), NO_KEY if has_log_scale else 0.0),
    )


def check_state(state: State, query_features: Float[Tensor, "b h n m"], value: Float[Tensor, "b h n e"]) -> None:
    """Refuse a state that does not belong to such features and values."""
    (b, h, _, m), e = query_features.shape, value.shape[-1]
    expected = {"kv": (b, h, m, e), "key_sum": (b, h, m), "position": (b,), "log_scale": (b, h)}
    names = {"kv": "(b, h, m, e)", "key_sum": "(b, h, m)", "position": "(b,)", "log_scale": "(b, h)"}
    for name, shape in expected.items():
        found = tuple(getattr(state, name).shape)
        if found != shape:
            raise ValueError(f"state.{name} must be {names[name]} = {shape}, got {found}")


def divide(numerator: Float[Tensor, "b h n e"], normalizer: Float[Tensor, "b h n"]) -> Float[Tensor, "b h n e"]:
    """numerator / normalizer, and 0 where there is nothing to attend to (the normalizer is 0)."""
    # Below the smallest normal number a reciprocal overflows, and its gradient with it.
    nothing = (normalizer.abs() < torch.finfo(normalizer.dtype).tiny)[..., None]
    return (numerator / normalizer[..., None].masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


def rms_norm(numerator: Float[Tensor, "b h n e"], epsilon: float) -> Float[Tensor, "b h n e"]:
    """numerator / √(its mean square over e + ``epsilon``), and 0 where it is 0."""
    largest = numerator.detach().abs().amax(-1, keepdim=True)
    if epsilon:
        size = largest.clamp_min(1.0)  # squares of large sums overflow
        unit = numerator / size
        return unit * (unit.square().mean(-1, keepdim=True) + epsilon / size.square()).rsqrt()
    nothing = largest == 0
    unit = numerator / largest.masked_fill(nothing, 1.0)  # and those of small ones vanish
    return (unit * unit.square().mean(-1, keepdim=True).masked_fill(nothing, 1.0).rsqrt()).masked_fill(nothing, 0.0)
