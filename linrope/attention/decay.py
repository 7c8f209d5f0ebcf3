"""Linear attention that forgets: what a key adds shrinks by a factor for every token of distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linrope.attention.inputs import Inputs
from linrope.attention.state import NO_KEY, State, divide
from linrope.rotary import Rotation
from linrope.transforms import is_transformed

DecayPlacement = Literal["numerator", "both"]
Attend = Callable[[Inputs, State], tuple[Tensor, State]]

# Rates of features multiply keys by exp(rate · age): a block of tokens is so short that the exponent stays within this.
_LARGEST_EXPONENT = 32.0


class _Ages(NamedTuple):
    """Tokens since the first key of a block, in float64, whose fractions last to any position."""

    query: Float[Tensor, "b 1 c"]
    key: Float[Tensor, "b 1 c"]
    before: Float[Tensor, "b h"]  # of the key that the state before is relative to: 0 where there is none
    after: Float[Tensor, "b 1"]  # of the one that the state after will be


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
    # On an accelerator one would have to wait for the numbers.
    if log_decay is not None and log_decay.device.type == "cpu" and not _is_traced():
        fits = (log_decay <= 0) & log_decay.isfinite()
        if not fits.all():
            raise ValueError(f"log_decay must be finite and at most 0, got {log_decay.tolist()}")
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
    query_at, key_at = (
        (torch.arange(n, device=device) if at is None else at).to(wide).expand(b, n)
        for at in (inputs.query_positions, inputs.key_positions)
    )
    end = key_at[:, -1:]  # what the next call will take the state to be relative to
    if inputs.key_mask is not None:
        key_at = _with_the_present(key_at, inputs.key_mask)
    rate = None if log_decay is None else -log_decay.to(device, wide)
    of_features = inputs.rotary.rates(m) if isinstance(inputs.rotary, Rotation) else None
    rates = None if of_features is None else torch.tensor(of_features, dtype=wide, device=device)
    turned = dict(zip(("query", "key"), inputs.rotated(), strict=True))
    parts = (
        inputs._replace(**turned, rotary=None),
        inputs._replace(value=inputs.value.new_ones(*inputs.value.shape[:3], 1), rotary=None),
    )
    if rates is not None and _is_traced():  # float64 takes exponents in one block that float32 takes in many
        parts = tuple(
            part._replace(query=part.query.to(wide), key=part.key.to(wide), value=part.value.to(wide)) for part in parts
        )

    given, outputs = state, []
    state = state._replace(log_scale=state.log_scale.to(wide))
    last = torch.where(state.log_scale > NO_KEY, (state.position - 1).to(wide)[:, None], key_at[:, :1])
    blocks = _blocks(inputs, key_at, of_features)
    for tokens in blocks:
        start = key_at[:, tokens][:, :1]
        after = end if tokens is blocks[-1] else key_at[:, tokens][:, -1:]
        ages = _Ages(
            (query_at[:, tokens] - start)[:, None], (key_at[:, tokens] - start)[:, None], last - start, after - start
        )
        rotated, plain = (_part(part, tokens) for part in parts)
        if rates is not None:
            rotated, state = _aged_by_feature(rotated, state, ages, rates)
        output, state = _attend_aged(
            rotated, plain, state, ages, rate, attend, both=placement == "both" and divides, divides=divides
        )
        if rates is not None:
            state = _faded(state, rates * ages.after[..., None])
        last = after
        outputs.append(output)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    kept = (x.to(like.dtype) for x, like in zip(state, given, strict=True))
    return output.to(inputs.value.dtype), State(*kept)


def _with_the_present(positions: Float[Tensor, "b n"], mask: Bool[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    """Positions in which masked keys, which may be anywhere, stand with the present one before, or the first one after."""
    numbers = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    before = torch.where(mask, numbers, -1).cummax(-1).values
    first = mask.long().argmax(-1, keepdim=True)
    return positions.gather(1, torch.where(before < 0, first, before))


def _is_traced() -> bool:
    """Whether lengths and numbers may be unknown."""
    return torch.compiler.is_compiling() or is_transformed()


def _blocks(inputs: Inputs, positions: Float[Tensor, "b n"], rates: tuple[float, ...] | None) -> list[slice]:
    """Tokens that are attended together: all of them, but with rates of features only so many as exponents allow."""
    if rates is None or not any(rates) or _is_traced():
        return [slice(None)]
    n, longest = inputs.query.shape[2], _LARGEST_EXPONENT / max(rates)
    size = max(1, int(min(longest, n)))
    if inputs.key_positions is not None and positions.numel():  # they may leap
        while size > 1 and _span(positions, size) > 2 * longest:
            size //= 2
    return [slice(first, first + size) for first in range(0, n, size)]


def _span(positions: Float[Tensor, "b n"], size: int) -> float:
    """Tokens from the least position of a block to its largest, in the block where they are most."""
    spans = [part.amax(-1) - part.amin(-1) for part in positions.split(size, dim=1)]
    return float(torch.stack(spans).max())


def _part(inputs: Inputs, tokens: slice) -> Inputs:
    scale, mask = inputs.log_scale, inputs.key_mask
    return Inputs(
        inputs.query[:, :, tokens],
        inputs.key[:, :, tokens],
        inputs.value[:, :, tokens],
        None if scale is None else scale[:, :, tokens],
        rotary=None,
        query_positions=None,
        key_positions=None,
        key_mask=None if mask is None else mask[:, tokens],
    )


def _aged_by_feature(rotated: Inputs, state: State, ages: _Ages, rates: Float[Tensor, " m"]) -> tuple[Inputs, State]:
    """Queries times exp(-rate · age), keys times exp(rate · age), and the state up to the first key of the block."""
    query = rotated.query * (-rates * ages.query[..., None]).exp().to(rotated.query.dtype)
    key = rotated.key * (rates * ages.key[..., None]).exp().to(rotated.key.dtype)
    return rotated._replace(query=query, key=key), _faded(state, -rates * ages.before[..., None])


def _faded(state: State, exponents: Float[Tensor, "*b m"]) -> State:
    """The features of kv times exp(-exponents)."""
    return state._replace(kv=state.kv * (-exponents).exp()[..., None].to(state.kv.dtype))


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
    first = state._replace(kv=state.kv.to(rotated.key.dtype), key_sum=torch.zeros_like(state.key_sum))
    second = first._replace(kv=state.key_sum[..., None])
    scale = plain.log_scale
    if rate is not None:
        aged = rate[:, None] * ages.key
        aged = aged if scale is None else scale + aged
        if plain.key_mask is not None:
            aged = aged.masked_fill(~plain.key_mask[:, None], NO_KEY)
        rotated, first = rotated._replace(log_scale=aged), _grown(first, rate * ages.before)
        if both:
            plain, second = plain._replace(log_scale=aged), _grown(second, rate * ages.before)
    numerator, sums = attend(rotated, first)
    normalizer, key_sums = attend(plain, second)
    if rate is not None and both:
        to_last = -rate * ages.after
        sums, key_sums = _grown(sums, to_last), _grown(key_sums, to_last)
    elif rate is not None:
        if scale is None:
            key_sums = key_sums._replace(log_scale=torch.zeros_like(sums.log_scale))
        top = _running_maximum(rotated.log_scale, first) - rate[:, None] * ages.query
        kept = sums.log_scale - rate * ages.after - key_sums.log_scale
        if scale is not None:
            top = top - _running_maximum(scale, second)
        numerator = numerator * top.exp()[..., None].to(numerator.dtype)
        sums = sums._replace(kv=sums.kv * kept.exp()[..., None, None].to(sums.kv.dtype))
    elif scale is None:
        key_sums = key_sums._replace(log_scale=torch.zeros_like(sums.log_scale))
    output = divide(numerator, normalizer[..., 0]) if divides else numerator
    return output, State(sums.kv, key_sums.kv[..., 0], state.position, key_sums.log_scale)


def _grown(state: State, exponent: Float[Tensor, "b h"]) -> State:
    """``state`` times exp(exponent), which its log-scale takes; the sums take the gradient, for log-scales have none."""
    constant = exponent.detach()
    if exponent.requires_grad:
        state = state._replace(kv=state.kv * (exponent - constant).exp()[..., None, None].to(state.kv.dtype))
    return state._replace(log_scale=state.log_scale + constant)


def _running_maximum(log_scale: Tensor | None, state: State) -> Float[Tensor, "b h c"]:
    """What each path takes its sums relative to."""
    assert log_scale is not None
    return torch.maximum(log_scale.detach().cummax(-1).values, state.log_scale[..., None])
