"""Multi-head softmax attention, the quadratic baseline."""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from linrope.layers.heads import Heads, Projections, head_dim_of, next_positions, project, project_next
from linrope.layers.position_bias import PositionBias
from linrope.layers.short_conv import ShortConvState, make_short_convs
from linrope.rotary import Rotation, check_rotary, check_streams


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


class PositionedKeyValueState(NamedTuple):
    """What softmax attention with a position bias remembers: :class:`KeyValueState`, and where its keys stand.

    Attributes:
        key: Rotated keys.
        value: Values.
        key_mask: True where a key takes part.
        position: Position of the next token, in tokens.
        key_positions: Position of each key, in tokens.
    """

    key: Float[Tensor, "b h s d"]
    value: Float[Tensor, "b h s e"]
    key_mask: Bool[Tensor, "b s"]
    position: Int[Tensor, " b"]
    key_positions: Int[Tensor, "b s"]


class SoftmaxAttention(nn.Module):
    """Multi-head softmax attention, the quadratic baseline, with the calls of :class:`LinearAttention`.

    softmax(q·k/√d + bias), with queries and keys rotated where ``rotary`` is given, and without a bias where
    ``position_bias`` is not. A row with no key to attend to is 0.

    Args:
        d_model: Width of inputs and outputs.
        num_heads: h; divides ``d_model``.
        rotary: The rotation of queries and keys, or None.
        causal: Whether a token attends to itself and earlier tokens alone.
        bias: Whether the four projections have biases.
        short_conv: Width, in tokens, of a causal convolution of projected queries, keys and values each
            (:class:`ShortConv`); None: no convolution.
        position_bias: What positions add to the logits, for as many heads, or None.

    Raises:
        ValueError: ``num_heads`` does not divide ``d_model``, a rotation of less than one pair or one that decays, a
            ``short_conv`` below 2 or where not causal, or a ``position_bias`` for another number of heads.

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
        position_bias: PositionBias | None = None,
    ) -> None:
        super().__init__()
        head_dim = head_dim_of(d_model, num_heads)
        check_rotary(rotary, num_heads)
        if position_bias is not None and not isinstance(position_bias, PositionBias):
            raise ValueError(f"position_bias must be a linrope.PositionBias or None, got {position_bias!r}")
        if position_bias is not None and position_bias.num_heads != num_heads:
            raise ValueError(
                f"position_bias must be for num_heads={num_heads} as the layer is, got one for {position_bias.num_heads}"
            )
        self.num_heads, self.head_dim, self.causal = num_heads, head_dim, causal
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model, bias=bias) for _ in range(4))
        if rotary is not None and rotary.rates(head_dim) is not None:
            raise ValueError(
                f"{type(rotary).__name__} decays with distance, which is for the numerator of linear attention"
            )
        self.short_conv = short_conv
        self.query_conv, self.key_conv, self.value_conv = make_short_convs(short_conv, d_model, d_model, causal=causal)
        self.rotary = None if rotary is None else rotary.for_width(head_dim)
        self.position_bias = position_bias

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
        if key_mask is not None:
            _check_key_mask(key_mask, key)
        if self.rotary is not None:
            query, key = self.rotary.before(query, key, positions, context_positions, key_mask)
        bias = self.logit_bias(query, key, positions, context_positions)
        if key_mask is None and bias is None:
            output = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            output = _masked_attention(query, key, value, key_mask, bias, causal=self.causal)
        return self.out(rearrange(output, "b h n e -> b n (h e)"))

    def stream(
        self,
        x: Float[Tensor, "b n d_model"],
        state: KeyValueState | PositionedKeyValueState | ShortConvState | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n d_model"], KeyValueState | PositionedKeyValueState | ShortConvState]:
        """Attend from the next tokens to themselves and all before; as :meth:`LinearAttention.stream`.

        The state is a :class:`PositionedKeyValueState` where the layer has a position bias.
        """
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
        key_positions = None
        if self.position_bias is not None:
            key_positions = _positions_of(key, positions).expand(x.shape[:2]).long()
        if before is not None:
            if key_positions is not None:
                if not isinstance(before, PositionedKeyValueState):
                    raise ValueError(
                        f"a layer with a position bias needs the positions of past keys, got a {type(before).__name__}"
                    )
                key_positions = torch.cat((before.key_positions, key_positions), dim=1)
            key, value = torch.cat((before.key, key), dim=2), torch.cat((before.value, value), dim=2)
            key_mask = torch.cat((before.key_mask, key_mask), dim=1)
        bias = self.logit_bias(query, key, positions, key_positions)
        output = _masked_attention(query, key, value, key_mask, bias, causal=True)
        if x.shape[1]:
            position = positions.expand(x.shape[:2])[:, -1].long() + 1
        else:
            position = key.new_zeros(x.shape[0], dtype=torch.long) if before is None else before.position
        output = self.out(rearrange(output, "b h n e -> b n (h e)"))
        if key_positions is None:
            after = KeyValueState(key, value, key_mask, position)
        else:
            after = PositionedKeyValueState(key, value, key_mask, position, key_positions)
        return output, ShortConvState(after, *inputs) if inputs else after

    def logit_bias(
        self,
        query: Float[Tensor, "b h n d"],
        key: Float[Tensor, "b h s d"],
        query_positions: Int[Tensor, "*b n"] | None = None,
        key_positions: Int[Tensor, "*b s"] | None = None,
    ) -> Float[Tensor, "#b h n s"] | None:
        """What ``position_bias`` adds to the logits of ``query`` and ``key``, in float32 or wider; None where there is none.

        Args:
            query: Queries, for their shape and dtype.
            key: Keys, for their shape.
            query_positions: In tokens; 0, 1, … by default.
            key_positions: In tokens; 0, 1, … by default.

        Raises:
            ValueError: Positions or a bias that do not fit.
        """
        if self.position_bias is None:
            return None
        at, of = _positions_of(query, query_positions), _positions_of(key, key_positions)
        bias = self.position_bias(at, of, torch.promote_types(query.dtype, torch.float32))
        (b, h, n, _), s = query.shape, key.shape[2]
        if bias.ndim != 4 or bias.shape[0] not in (1, b) or bias.shape[1:] != (h, n, s):
            raise ValueError(
                f"position_bias must give a bias of shape (1 or b, h, n, s) = (1 or {b}, {h}, {n}, {s}), "
                f"got {tuple(bias.shape)}"
            )
        return bias

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


def _positions_of(x: Tensor, positions: Tensor | None) -> Tensor:
    """``positions`` of the tokens of ``x``, b h n d; 0, 1, … where they are None."""
    b, _, n, _ = x.shape
    if positions is None:
        return torch.arange(n, device=x.device)
    if positions.shape not in ((n,), (1, n), (b, n)):
        raise ValueError(f"positions must be (n,) or (b, n) with n = {n} and b = {b}, got {tuple(positions.shape)}")
    return positions


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, bias: Tensor | None, *, causal: bool
) -> Tensor:
    """Softmax attention of the last n tokens to all s that ``key_mask`` allows, with ``bias`` added to the logits."""
    n, s = query.shape[2], key.shape[2]
    allowed = torch.ones(1, 1, n, s, dtype=torch.bool, device=query.device)
    if causal:
        allowed = allowed.tril(s - n)
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None, :]
        absent = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(absent, 0.0), value.masked_fill(absent, 0.0)
    if bias is None or not s:
        nothing = ~allowed.any(-1, keepdim=True)
        mask = allowed | nothing
    else:
        mask = bias.masked_fill(~allowed, -torch.inf)
        top = mask.detach().amax(-1, keepdim=True)
        nothing = top == -torch.inf
        # Relative to the row's largest, which changes no weight: what counts then is small, and in range of any dtype.
        mask = (mask - top).masked_fill(nothing, 0.0).to(query.dtype)
    # A softmax over nothing is NaN: such rows attend anywhere, to be set to 0 afterwards.
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).masked_fill(nothing, 0.0)


def softmax_weights(
    query: Tensor, key: Tensor, attended: Tensor, bias: Tensor | None = None
) -> Float[Tensor, "b h n s"]:
    """softmax(q·k/√d + bias) over the keys that are ``attended`` to, explicitly; 0 where there are none."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = (scores if bias is None else scores + bias).masked_fill(~attended, -torch.inf)
    return scores.softmax(-1).masked_fill(~attended, 0.0).nan_to_num(0.0)
