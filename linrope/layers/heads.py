"""What both kinds of layers do with heads and positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linrope.layers.short_conv import ShortConv, ShortConvState


def head_dim_of(d_model: int, num_heads: int) -> int:
    """Width of a head; ValueError if heads do not divide ``d_model``."""
    if num_heads < 1 or d_model % num_heads:
        raise ValueError(f"num_heads must divide d_model, got num_heads={num_heads} and d_model={d_model}")
    return d_model // num_heads


def split_heads(x: Float[Tensor, "b n d_model"], num_heads: int) -> Float[Tensor, "b h n d"]:
    """Deal the last axis out to heads."""
    return rearrange(x, "b n (h d) -> b h n d", h=num_heads)


Heads = tuple[Float[Tensor, "b h n d"], Float[Tensor, "b k s d"], Float[Tensor, "b k s d"]]
Convs = tuple[ShortConv | None, ShortConv | None, ShortConv | None]


class Projections(NamedTuple):
    """What makes queries, keys and values: three projections, and the short convolution after each, if there is one."""

    linears: tuple[nn.Linear, nn.Linear, nn.Linear]
    convs: Convs
    head_dim: int


def project(
    projections: Projections,
    x: Float[Tensor, "b n d_model"],
    context: Float[Tensor, "b s d_model"] | None,
    *,
    key_mask: Bool[Tensor, "b s"] | None = None,
    offsets: Int[Tensor, " p+1"] | None = None,
) -> Heads:
    """Queries of ``x``; keys and values of ``context``, which is ``x`` where it is None; by heads.

    ``key_mask`` and ``offsets`` are for the convolutions, where there are any.

    Raises:
        ValueError: Shapes that do not fit.
    """
    query, key, value = (
        y if conv is None else conv(y, mask=mask, offsets=offsets)
        for y, conv, mask in zip(
            _project(projections, x, context),
            projections.convs,
            (key_mask if context is None else None, key_mask, key_mask),
            strict=True,
        )
    )
    return _by_heads(projections, query, key, value)


def project_next(
    projections: Projections, x: Float[Tensor, "b n d_model"], state: Any, *, key_mask: Bool[Tensor, "b n"] | None
) -> tuple[Heads, Any, tuple[Tensor, ...]]:
    """Queries, keys and values of the next tokens; the attention's own state; and what the convolutions keep, or nothing.

    Raises:
        ValueError: Shapes that do not fit, or the state of a layer without convolutions for one with them or vice versa.
    """
    projected = _project(projections, x, None)
    has_convs = None not in projections.convs
    if state is not None and isinstance(state, ShortConvState) != has_convs:
        expected = (
            "with short_conv goes on from a" if has_convs else "without short_conv goes on from another state than a"
        )
        raise ValueError(f"a layer {expected} ShortConvState, got {type(state).__name__}")
    if not has_convs:
        return _by_heads(projections, *projected), state, ()
    before = (None, None, None) if state is None else state[1:]
    (query, key, value), last = zip(
        *(
            conv.stream(y, inputs, mask=key_mask)
            for conv, y, inputs in zip(projections.convs, projected, before, strict=True)
            if conv is not None
        ),
        strict=True,
    )
    return _by_heads(projections, query, key, value), None if state is None else state.attention, last


def _by_heads(projections: Projections, *projected: Tensor) -> Heads:
    query, key, value = (split_heads(y, y.shape[-1] // projections.head_dim) for y in projected)
    return query, key, value


def _project(projections: Projections, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    width = projections.linears[0].in_features
    for name, tokens in (("x", x), ("context", context)):
        if tokens is not None and (tokens.ndim != 3 or tokens.shape[-1] != width):
            raise ValueError(f"{name} must be (b, n, d_model) with d_model = {width}, got {tuple(tokens.shape)}")
    context = x if context is None else context
    query, key, value = (f(y) for f, y in zip(projections.linears, (x, context, context), strict=True))
    return query, key, value


def share_heads(x: Float[Tensor, "b k s d"], num_heads: int) -> Float[Tensor, "b h s d"]:
    """Let each of k heads serve h/k neighbouring heads.

    Raises:
        ValueError: k does not divide h.

    Source: Ainslie et al. 2023 (arXiv 2305.13245).
    """
    k = x.shape[1]
    if k == num_heads:
        return x
    if not k or num_heads % k:
        raise ValueError(f"heads of keys and values must divide those of queries, got {k} and {num_heads}")
    return x.repeat_interleave(num_heads // k, dim=1)


def next_positions(b: int, n: int, position: Int[Tensor, " b"] | None, device: torch.device) -> Int[Tensor, "b n"]:
    """Positions of the next n tokens of b rows, which follow those up to ``position``; None: there were none.

    Raises:
        ValueError: The state is of another number of rows.
    """
    ahead = torch.arange(n, device=device).expand(b, n)
    if position is None:
        return ahead
    if position.shape != (b,):
        raise ValueError(f"the state is of {len(position)} rows, x of {b}")
    return position[:, None] + ahead
