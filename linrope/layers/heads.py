"""What both kinds of layers do with heads and positions."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn


def head_dim_of(d_model: int, num_heads: int) -> int:
    """Width of a head; ValueError if heads do not divide ``d_model``."""
    if num_heads < 1 or d_model % num_heads:
        raise ValueError(f"num_heads must divide d_model, got num_heads={num_heads} and d_model={d_model}")
    return d_model // num_heads


def split_heads(x: Float[Tensor, "b n d_model"], num_heads: int) -> Float[Tensor, "b h n d"]:
    """Deal the last axis out to heads."""
    return rearrange(x, "b n (h d) -> b h n d", h=num_heads)


def project(
    to_heads: tuple[nn.Linear, nn.Linear, nn.Linear],
    head_dim: int,
    x: Float[Tensor, "b n d_model"],
    context: Float[Tensor, "b s d_model"] | None,
) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b k s d"], Float[Tensor, "b k s d"]]:
    """Queries of ``x``; keys and values of ``context``, which is ``x`` where it is None; heads as wide as ``head_dim``.

    Raises:
        ValueError: Shapes that do not fit.
    """
    width = to_heads[0].in_features
    for name, tokens in (("x", x), ("context", context)):
        if tokens is not None and (tokens.ndim != 3 or tokens.shape[-1] != width):
            raise ValueError(f"{name} must be (b, n, d_model) with d_model = {width}, got {tuple(tokens.shape)}")
    context = x if context is None else context
    query, key, value = (
        split_heads(f(y), f.out_features // head_dim) for f, y in zip(to_heads, (x, context, context), strict=True)
    )
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
