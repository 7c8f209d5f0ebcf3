"""Attention layers: thin owners of the projections around the pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from linrope.attention import Backend, State, linear_attention, stream_linear_attention
from linrope.feature_maps import EluPlusOne, FeatureMap
from linrope.rotary import Rotary


class LinearAttention(nn.Module):
    """Multi-head linear attention, for self- and cross-attention.

    Args:
        d_model: Width of inputs and outputs.
        num_heads: h; divides ``d_model``.
        feature_map: Factory that gets head_dim: a class, a ``functools.partial``.
        rotary: The rotation, or None for no rotation. Where it would turn an odd number of features,
            the last of them passes through.
        rotary_placement: ``"numerator"`` rotates mapped queries and keys, in the numerator alone
            (RoFormer, eq. 19); ``"before"`` rotates queries and keys before they are mapped, as
            performer-pytorch does.
        causal: Whether a token attends to itself and earlier tokens alone.
        bias: Whether the four projections have biases.
        chunk_size: Tokens per block of the causal form; changes speed and memory, not the result.
        backend: See :func:`linrope.linear_attention`.

    Raises:
        ValueError: ``num_heads`` does not divide ``d_model``, an unknown ``rotary_placement``, a
            rotation of less than one pair.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        feature_map: Callable[[int], FeatureMap] = EluPlusOne,
        rotary: Rotary | None = None,
        rotary_placement: Literal["numerator", "before"] = "numerator",
        causal: bool = True,
        bias: bool = False,
        chunk_size: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if rotary_placement not in ("numerator", "before"):
            raise ValueError(f"rotary_placement must be 'numerator' or 'before', got {rotary_placement!r}")
        head_dim = _head_dim(d_model, num_heads)
        self.num_heads, self.causal, self.rotary_placement = num_heads, causal, rotary_placement
        self.chunk_size = chunk_size
        self.backend: Backend = backend
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model, bias=bias) for _ in range(4))
        self.feature_map = feature_map(head_dim)
        width = self.feature_map.num_features if rotary_placement == "numerator" else head_dim
        self.rotary = None if rotary is None else rotary.for_width(width)

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b s d_model"] | None = None,
        *,
        key_mask: Bool[Tensor, "b s"] | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
        context_positions: Int[Tensor, "*b s"] | None = None,
    ) -> Float[Tensor, "b n d_model"]:
        """Attend from ``x`` to ``context``, or to itself.

        Args:
            x: What queries are made of.
            context: What keys and values are made of; ``x`` by default.
            key_mask: True where a key takes part.
            positions: Of ``x``, in tokens; 0, 1, … by default.
            context_positions: Of ``context``, in tokens; 0, 1, … by default.

        Raises:
            ValueError: Shapes that do not fit; another length of ``context`` where the layer is causal.
        """
        query, key, value = _project(self, x, context)
        if positions is None:
            positions = torch.arange(query.shape[2], device=x.device)
        if context is None:
            context_positions = positions
        elif context_positions is None:
            context_positions = torch.arange(key.shape[2], device=x.device)
        query, key, log_scale = self._map(query, key, positions, context_positions)
        output = linear_attention(
            query,
            key,
            value,
            rotary=self._numerator_rotary,
            causal=self.causal,
            key_mask=key_mask,
            query_positions=positions,
            key_positions=context_positions,
            chunk_size=self.chunk_size,
            backend=self.backend,
            key_log_scale=log_scale,
        )
        return self.out(rearrange(output, "b h n e -> b n (h e)"))

    def stream(
        self,
        x: Float[Tensor, "b n d_model"],
        state: State | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n d_model"], State]:
        """Attend from the next tokens to themselves and all before them; returns outputs and the new state.

        Args:
            x: The next tokens, any number of them.
            state: What the call for the tokens before returned; None at the start.
            key_mask: True where a key takes part.
            positions: In tokens; by default they go on from ``state.position``.

        Raises:
            ValueError: The layer is not causal, or shapes do not fit.
        """
        if not self.causal:
            raise ValueError("only a causal layer streams; this one was made with causal=False")
        query, key, value = _project(self, x, None)
        if positions is None:
            positions = _next_positions(x, state)
        query, key, log_scale = self._map(query, key, positions, positions)
        output, state = stream_linear_attention(
            query,
            key,
            value,
            state,
            rotary=self._numerator_rotary,
            key_mask=key_mask,
            query_positions=positions,
            chunk_size=self.chunk_size,
            backend=self.backend,
            key_log_scale=log_scale,
        )
        return self.out(rearrange(output, "b h n e -> b n (h e)")), state

    @property
    def _numerator_rotary(self) -> Rotary | None:
        return self.rotary if self.rotary_placement == "numerator" else None

    def _map(
        self, query: Tensor, key: Tensor, positions: Tensor, context_positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Mapped queries, mapped keys and the keys' log-scales."""
        if self.rotary is not None and self.rotary_placement == "before":
            query, key = self.rotary(query, positions), self.rotary(key, context_positions)
        return self.feature_map.scaled_query(query), *self.feature_map.scaled_key(key)

    def extra_repr(self) -> str:  # noqa: D102
        return f"num_heads={self.num_heads}, causal={self.causal}, rotary_placement={self.rotary_placement!r}"


class KeyValueState(NamedTuple):
    """What softmax attention remembers: every key and value so far.

    Attributes:
        key: Rotated keys.
        value: Values.
        key_mask: True where a key takes part.
        position: Position of the next token, in tokens.
    """

    key: Float[Tensor, "b h s d"]
    value: Float[Tensor, "b h s e"]
    key_mask: Bool[Tensor, "b s"]
    position: Int[Tensor, " b"]


class SoftmaxAttention(nn.Module):
    """Multi-head softmax attention, the quadratic baseline, with the calls of :class:`LinearAttention`.

    softmax(q·k/√d), with queries and keys rotated where ``rotary`` is given. A row with no key to
    attend to is 0.

    Args:
        d_model: Width of inputs and outputs.
        num_heads: h; divides ``d_model``.
        rotary: The rotation of queries and keys, or None.
        causal: Whether a token attends to itself and earlier tokens alone.
        bias: Whether the four projections have biases.

    Raises:
        ValueError: ``num_heads`` does not divide ``d_model``, or a rotation of less than one pair.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), eq. 1; Su et al. 2021 (arXiv 2104.09864), eq. 16.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        rotary: Rotary | None = None,
        causal: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        head_dim = _head_dim(d_model, num_heads)
        self.num_heads, self.causal = num_heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model, bias=bias) for _ in range(4))
        self.rotary = None if rotary is None else rotary.for_width(head_dim)

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b s d_model"] | None = None,
        *,
        key_mask: Bool[Tensor, "b s"] | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
        context_positions: Int[Tensor, "*b s"] | None = None,
    ) -> Float[Tensor, "b n d_model"]:
        """Attend from ``x`` to ``context``, or to itself; arguments as in :meth:`LinearAttention.forward`."""
        query, key, value = _project(self, x, context)
        n, s = query.shape[2], key.shape[2]
        if self.causal and n != s:
            raise ValueError(
                f"causal attention needs as many keys as queries, got {s} keys and {n} queries; "
                "make the layer with causal=False"
            )
        if positions is None:
            positions = torch.arange(n, device=x.device)
        if context is None:
            context_positions = positions
        elif context_positions is None:
            context_positions = torch.arange(s, device=x.device)
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, context_positions)
        if key_mask is None:
            output = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            _check_key_mask(key_mask, key)
            output = _masked_attention(query, key, value, key_mask, causal=self.causal)
        return self.out(rearrange(output, "b h n e -> b n (h e)"))

    def stream(
        self,
        x: Float[Tensor, "b n d_model"],
        state: KeyValueState | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n d_model"], KeyValueState]:
        """Attend from the next tokens to themselves and all before; as :meth:`LinearAttention.stream`."""
        if not self.causal:
            raise ValueError("only a causal layer streams; this one was made with causal=False")
        query, key, value = _project(self, x, None)
        if positions is None:
            positions = _next_positions(x, state)
        if key_mask is None:
            key_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        _check_key_mask(key_mask, key)
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        if state is not None:
            key, value = torch.cat((state.key, key), dim=2), torch.cat((state.value, value), dim=2)
            key_mask = torch.cat((state.key_mask, key_mask), dim=1)
        output = _masked_attention(query, key, value, key_mask, causal=True)
        if x.shape[1]:
            position = positions.expand(x.shape[:2])[:, -1].long() + 1
        else:
            position = key.new_zeros(x.shape[0], dtype=torch.long) if state is None else state.position
        output = self.out(rearrange(output, "b h n e -> b n (h e)"))
        return output, KeyValueState(key, value, key_mask, position)

    def extra_repr(self) -> str:  # noqa: D102
        return f"num_heads={self.num_heads}, causal={self.causal}"


def _head_dim(d_model: int, num_heads: int) -> int:
    if num_heads < 1 or d_model % num_heads:
        raise ValueError(f"num_heads must divide d_model, got num_heads={num_heads} and d_model={d_model}")
    return d_model // num_heads


def _project(
    layer: LinearAttention | SoftmaxAttention, x: Tensor, context: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of ``x``; keys and values of ``context``, each ``b h n d``."""
    width = layer.query.in_features
    for name, tokens in (("x", x), ("context", context)):
        if tokens is not None and (tokens.ndim != 3 or tokens.shape[-1] != width):
            raise ValueError(f"{name} must be (b, n, d_model) with d_model = {width}, got {tuple(tokens.shape)}")
    context = x if context is None else context
    projected = layer.query(x), layer.key(context), layer.value(context)
    query, key, value = (rearrange(y, "b n (h d) -> b h n d", h=layer.num_heads) for y in projected)
    return query, key, value


def _next_positions(x: Tensor, state: State | KeyValueState | None) -> Tensor:
    """Positions ``(b, n)`` of the tokens that follow ``state``."""
    ahead = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    return ahead if state is None else state.position[:, None] + ahead


def _check_key_mask(key_mask: Tensor, key: Tensor) -> None:
    expected = (key.shape[0], key.shape[2])
    if key_mask.shape != expected or key_mask.dtype != torch.bool:
        raise ValueError(
            f"key_mask must be bool of shape (b, s) = {expected}, True where a key takes part; "
            f"got {key_mask.dtype} of shape {tuple(key_mask.shape)}"
        )


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor, *, causal: bool) -> Tensor:
    """Softmax attention of the last n tokens to all s that ``key_mask`` allows."""
    n, s = query.shape[2], key.shape[2]
    allowed = key_mask[:, None, None, :].expand(-1, 1, n, -1)
    if causal:
        allowed = allowed & torch.ones(n, s, dtype=torch.bool, device=query.device).tril(s - n)
    nothing = ~allowed.any(-1, keepdim=True)
    absent = ~key_mask[:, None, :, None]
    # A softmax over nothing is NaN: such rows attend anywhere, to be set to 0 afterwards.
    output = scaled_dot_product_attention(
        query, key.masked_fill(absent, 0.0), value.masked_fill(absent, 0.0), attn_mask=allowed | nothing
    )
    return output.masked_fill(nothing, 0.0)
