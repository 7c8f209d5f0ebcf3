"""Linear attention that forgets: what a key adds shrinks by a factor for every token of distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from linrope.attention.inputs import Inputs
from linrope.attention.state import NO_KEY, State, divide
from linrope.rotary import Rotation
from linrope.transforms import is_transformed

DecayPlacement = Literal["numerator", "both"]
Attend = Callable[[Inputs, State], tuple[Tensor, State]]

# Ages count from the first key of a block: the larger they grow, the less float32 leaves of the fractions of logarithms.
_BLOCK = 1024
# Rates of features multiply keys by exp(rate · age): a block is so short that its exponents stay within this.
_LARGEST_EXPONENT = 32.0


class _Ages(NamedTuple):
    """Tokens since the first key of a block."""

    query: Float[Tensor, "b 1 c"]
    key: Float[Tensor, "b 1 c"]
    state: Float[Tensor, "b h"]  # of the key that the state is relative to: 0 or less, 0 where there is none


def forgets(log_decay: Tensor | None, rotary: Any, num_features: int) -> bool:
    """Whether anything decays."""
    return log_decay is not None or (isinstance(rotary, Rotation) and rotary.rates(num_features) is not None)


def check_decay(log_decay: Tensor | None, placement: str, rotary: Any, features: Tensor, *, causal: bool) -> None:
    """Refuse a decay that does not fit the mapped queries, or what is not causal.

    Raises:
        ValueError: The message says what was expected.
    """
    if placement not in ("numerator", "both"):
        raise ValueError(f"decay_placement must be 'numerator' or 'both', got {placement!r}")
    if log_decay is not None and log_decay.shape != features.shape[1:2]:
        raise ValueError(f"log_decay must be (h,) = ({features.shape[1]},), got {tuple(log_decay.shape)}")
    if not causal and forgets(log_decay, rotary, features.shape[-1]):
        raise ValueError(
            "a decay with distance is for causal attention: λ^|t - s| does not split into sums over all keys"
        )


def decayed(
    inputs: Inputs,
    state: State,
    log_decay: Float[Tensor, " h"] | None,
    placement: DecayPlacement,
    attend: Attend,
    *,
    divides: bool,
) -> tuple[Tensor, State]:
    """Weigh each key by λ^(p_t - p_s), with p the positions of query and key, in the numerator or in both sums.

        numerator_t  = Σ_s λ^(p_t - p_s) (R_t φ(q_t))·(R_s φ(k_s)) v_s
        normalizer_t = Σ_s λ^(p_t - p_s)      φ(q_t) ·     φ(k_s)        or without the factor

    λ^(-p_s) is a log-scale of the key, as maps have them, and every path takes log-scales relative to their running
    maximum: so λ^(-p), which overflows, is never formed. Together with that maximum the query's λ^(p_t) is a factor
    of at most 1. A rotation with rates (:class:`linrope.XPos`) forgets feature by feature, in the numerator.

    Args:
        inputs: As every path takes them.
        state: Of the tokens before, its sums relative to the last of them; without any, its log-scale is ``NO_KEY``.
        log_decay: ln λ of each head, at most 0; None: λ = 1.
        placement: Whether the normalizer forgets too.
        attend: Numerators of what it is given, by any path, and the state after them.
        divides: Whether there is a normalizer.
    """
    b, _, n, m = inputs.query.shape
    device = inputs.query.device
    wide = torch.float32 if device.type == "mps" else torch.float64
    rate = None if log_decay is None else -log_decay.to(device, wide)
    of_features = inputs.rotary.rates(m) if isinstance(inputs.rotary, Rotation) else None
    rates = None if of_features is None else torch.tensor(of_features, dtype=wide, device=device)
    query_at, key_at = (
        (torch.arange(n, device=device) if at is None else at).to(wide).expand(b, n)
        for at in (inputs.query_positions, inputs.key_positions)
    )
    block = n if isinstance(n, torch.SymInt) else _BLOCK
    if of_features and not isinstance(n, torch.SymInt):
        block = min(block, max(1, int(_LARGEST_EXPONENT / max(of_features))))
        if (
            inputs.key_positions is not None and n > 1 and not (torch.compiler.is_compiling() or is_transformed())
        ):  # they may leap
            while block > 1 and max(of_features) * _longest_span(key_at, block) > 2 * _LARGEST_EXPONENT:
                block //= 2
    turned = inputs.rotated()
    both = placement == "both" and divides  # where nothing divides, numerators are wanted as they are
    last, outputs = (state.position - 1).to(wide), []
    for first in range(0, n, block):
        tokens = slice(first, first + block)
        query, key, rotated_query, rotated_key, value = (
            x[:, :, tokens] for x in (inputs.query, inputs.key, *turned, inputs.value)
        )
        scale = None if inputs.log_scale is None else inputs.log_scale[:, :, tokens]
        start = key_at[:, first, None]
        ages = _Ages(
            query=(query_at[:, tokens] - start)[:, None],
            key=(key_at[:, tokens] - start)[:, None],
            state=torch.where(state.log_scale > NO_KEY, last[:, None] - start, 0.0),
        )
        last = key_at[:, tokens][:, -1]
        if rates is not None:
            rotated_query = rotated_query * (-rates * ages.query[..., None]).exp().to(value.dtype)
            rotated_key = rotated_key * (rates * ages.key[..., None]).exp().to(value.dtype)
            kept = (rates * ages.state[..., None]).exp()[..., None].to(value.dtype)
            state = state._replace(kv=state.kv * kept)
        plain = Inputs(query, key, value.new_ones(*value.shape[:3], 1), scale, None, None, None)
        rotated = Inputs(rotated_query, rotated_key, value, scale, None, None, None)
        output, state = _attend_aged(rotated, plain, state, ages, rate, attend, both=both, divides=divides)
        if rates is not None:
            kept = (-rates * ages.key[..., -1:]).exp()[..., None].to(value.dtype)
            state = state._replace(kv=state.kv * kept)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), state


def _longest_span(positions: Float[Tensor, "b n"], block: int) -> float:
    """Tokens from the least position of a block to its largest, in the block where they are most."""
    spans = [part.amax(-1) - part.amin(-1) for part in positions.split(block, dim=1)]
    return float(torch.stack(spans).max())


def _attend_aged(
    rotated: Inputs,
    plain: Inputs,
    state: State,
    ages: _Ages,
    rate: Float[Tensor, " h"] | None,
    attend: Attend,
    *,
    both: bool,
    divides: bool,
) -> tuple[Tensor, State]:
    """A block whose numerators are those of ``rotated``, and its normalizers those of ``plain``, whose values are 1."""
    unused = torch.zeros_like(state.key_sum)
    first, second = state._replace(key_sum=unused), state._replace(key_sum=unused, kv=state.key_sum[..., None])
    scale = plain.log_scale
    if rate is not None:
        aged = rate[:, None] * ages.key
        rotated = rotated._replace(log_scale=(aged if scale is None else scale + aged).to(state.kv.dtype))
        first = _grown(first, rate * ages.state)
        if both:
            plain, second = plain._replace(log_scale=rotated.log_scale), _grown(second, rate * ages.state)
    numerator, sums = attend(rotated, first)
    normalizer, key_sums = attend(plain, second)
    if scale is None and not (both and rate is not None):
        key_sums = key_sums._replace(log_scale=torch.zeros_like(state.log_scale))
    if rate is not None:
        to_last = -rate * ages.key[..., -1]
        if both:
            sums, key_sums = _grown(sums, to_last), _grown(key_sums, to_last)
        else:
            top = _running_maximum(rotated.log_scale, first) - rate[:, None] * ages.query
            kept = sums.log_scale + to_last - key_sums.log_scale
            if scale is not None:
                top = top - _running_maximum(scale, second)
            numerator = numerator * top.exp()[..., None].to(numerator.dtype)
            sums = sums._replace(kv=sums.kv * kept.exp()[..., None, None].to(numerator.dtype))
    output = divide(numerator, normalizer[..., 0]) if divides else numerator
    return output, State(sums.kv, key_sums.kv[..., 0], state.position, key_sums.log_scale)


def _grown(state: State, exponent: Float[Tensor, "b h"]) -> State:
    """``state`` times exp(exponent), which its log-scale takes; the sums take the gradient, for log-scales have none."""
    constant = exponent.detach()
    if exponent.requires_grad:
        factor = (exponent - constant).exp()[..., None, None].to(state.kv.dtype)
        state = state._replace(kv=state.kv * factor)
    return state._replace(log_scale=(state.log_scale + constant).to(state.log_scale.dtype))


def _running_maximum(log_scale: Tensor | None, state: State) -> Float[Tensor, "b h c"]:
    """What each path takes its sums relative to."""
    assert log_scale is not None
    return torch.maximum(log_scale.detach().cummax(-1).values, state.log_scale[..., None])
