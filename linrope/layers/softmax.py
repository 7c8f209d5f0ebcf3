"""Multi-head softmax attention, the quadratic baseline."""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from linrope.layers.heads import Heads, Projections, head_dim_of, next_positions, project, project_next
from linrope.layers.short_conv import ShortConvState, make_short_convs
from linrope.rotary import Rotation, check_streams


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
        short_conv: Width, in tokens, of a causal convolution of projected queries, keys and values each
            (:class:`ShortConv`); None: no convolution.

    Raises:
        ValueError: ``num_heads`` does not divide ``d_model``, a rotation of less than one pair or one that decays, or a
            ``short_conv`` below 2 or where not causal.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), eq. 1; Su et al. 2021 (arXiv 2104.09864), eq. 16.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        rotary: Rotation | None = None,
        causal: bool = True,
        bias: bool = False,
        short_conv: int | None = None,
    ) -> None:
        super().__init__()
        head_dim = head_dim_of(d_model, num_heads)
        self.num_heads, self.head_dim, self.causal = num_heads, head_dim, causal
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model, bias=bias) for _ in range(4))
        if rotary is not None and rotary.rates(head_dim) is not None:
            raise ValueError(
                f"{type(rotary).__name__} decays with distance, which is for the numerator of linear attention"
            )
        self.short_conv = short_conv
        self.query_conv, self.key_conv, self.value_conv = make_short_convs(short_conv, d_model, d_model, causal=causal)
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
        query, key, value = self.project(x, context, key_mask=key_mask)
        n, s = query.shape[2], key.shape[2]
        if self.causal and n != s:
            raise ValueError(
                f"causal attention needs as many keys as queries, got {s} keys and {n} queries; "
                "make the layer with causal=False"
            )
        if context is None:
            context_positions = positions
        if self.rotary is not None:
            query, key = self.rotary.before(query, key, positions, context_positions, key_mask)
        if key_mask is None:
            output = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            _check_key_mask(key_mask, key)
            output = _masked_attention(query, key, value, key_mask, causal=self.causal)
        return self.out(rearrange(output, "b h n e -> b n (h e)"))

    def stream(
        self,
        x: Float[Tensor, "b n d_model"],
        state: KeyValueState | ShortConvState | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n d_model"], KeyValueState | ShortConvState]:
        """Attend from the next tokens to themselves and all before; as :meth:`LinearAttention.stream`."""
        if not self.causal:
            raise ValueError("only a causal layer streams; this one was made with causal=False")
        check_streams(self.rotary)
        (query, key, value), before, inputs = project_next(self._projections, x, state, key_mask=key_mask)
        if positions is None:
            positions = next_positions(x.shape[0], x.shape[1], None if before is None else before.position, x.device)
        if key_mask is None:
            key_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        _check_key_mask(key_mask, key)
        if self.rotary is not None:
            query, key = self.rotary.before(query, key, positions, positions)
        if before is not None:
            key, value = torch.cat((before.key, key), dim=2), torch.cat((before.value, value), dim=2)
            key_mask = torch.cat((before.key_mask, key_mask), dim=1)
        output = _masked_attention(query, key, value, key_mask, causal=True)
        if x.shape[1]:
            position = positions.expand(x.shape[:2])[:, -1].long() + 1
        else:
            position = key.new_zeros(x.shape[0], dtype=torch.long) if before is None else before.position
        output = self.out(rearrange(output, "b h n e -> b n (h e)"))
        after = KeyValueState(key, value, key_mask, position)
        return output, ShortConvState(after, *inputs) if inputs else after

    def project(
        self,
        x: Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b s d_model"] | None = None,
        *,
        key_mask: Bool[Tensor, "b s"] | None = None,
    ) -> Heads:
        """Queries, keys and values by heads, as they are before any map or rotation; arguments as in :meth:`forward`."""
        return project(self._projections, x, context, key_mask=key_mask)

    @property
    def _projections(self) -> Projections:
        convs = (self.query_conv, self.key_conv, self.value_conv)
        return Projections((self.query, self.key, self.value), convs, self.head_dim)

    def extra_repr(self) -> str:  # noqa: D102
        return f"num_heads={self.num_heads}, causal={self.causal}"


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


def softmax_weights(query: Tensor, key: Tensor, attended: Tensor) -> Float[Tensor, "b h n s"]:
    """softmax(q·k/√d) over the keys that are ``attended`` to, explicitly; 0 where there are none."""
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~attended, -torch.inf)
    return scores.softmax(-1).masked_fill(~attended, 0.0).nan_to_num(0.0)
