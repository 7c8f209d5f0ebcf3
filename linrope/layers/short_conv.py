"""A short causal convolution over tokens, each feature on its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linrope.attention.packing import check_offsets
from linrope.precision import at_least_float32


class ShortConvState(NamedTuple):
    """What a layer with ``short_conv`` remembers: its attention's state, and the last inputs of the convolutions.

    Attributes:
        attention: Of the attention behind them, a :class:`linrope.State` or :class:`linrope.KeyValueState`.
        query: The last w - 1 projected queries, in the dtype that the projection gave; 0 where there were none.
        key: Projected keys, likewise.
        value: Projected values, likewise.
    """

    attention: Any
    query: Float[Tensor, "b w-1 c"]
    key: Float[Tensor, "b w-1 k"]
    value: Float[Tensor, "b w-1 k"]

    @property
    def position(self) -> Int[Tensor, " b"]:
        """Position of the next token, in tokens."""
        return self.attention.position


def short_conv(
    x: Float[Tensor, "b n c"],
    weight: Float[Tensor, "c 1 w"],
    *,
    mask: Bool[Tensor, "b n"] | None = None,
    offsets: Int[Tensor, " p+1"] | None = None,
) -> Float[Tensor, "b n c"]:
    """Weigh each token and the w - 1 before it, each feature by weights of its own.

        y_t = Σ_{i<w} weight[:, 0, w - 1 - i] · x_{t - i}

    with x 0 before the first token. Tokens that ``mask`` leaves out are absent: t - i counts the others alone.

    Args:
        x: Tokens.
        weight: As a depthwise ``conv1d`` has it: the present token's comes last.
        mask: True where a token is present. What stands where it is False is made of itself and the present ones before.
        offsets: Of sequences packed into one row; see :func:`linrope.linear_attention`. None sees another.

    Returns:
        In the dtype of ``x``; sums are float32 or wider.

    Raises:
        ValueError: Shapes that do not fit.

    Source: Poli et al. 2023 (Hyena, arXiv 2302.10866), the short filters of the projections; Gu and Dao 2023 (Mamba,
    arXiv 2312.00752) for width 4; Yang et al. 2024 (DeltaNet, arXiv 2406.06484) for it in linear attention.
    """
    return _short_conv(x, weight, None, mask, offsets)[0]


def stream_short_conv(
    x: Float[Tensor, "b n c"],
    weight: Float[Tensor, "c 1 w"],
    last: Float[Tensor, "b w-1 c"] | None = None,
    *,
    mask: Bool[Tensor, "b n"] | None = None,
) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b w-1 c"]]:
    """:func:`short_conv` that goes on from the ``last`` present tokens before; returns also those after.

    Args:
        x: The next tokens, any number of them.
        weight: As in :func:`short_conv`.
        last: What the call before returned, which is left as it is; None at the start.
        mask: As in :func:`short_conv`.

    Raises:
        ValueError: Shapes that do not fit.
    """
    y, table, num_present = _short_conv(x, weight, last, mask, None)
    kept = torch.arange(weight.shape[-1] - 1, device=x.device)
    if num_present is None:
        # A copy: a view would keep the tokens before it too.
        return y, table.index_select(1, x.shape[1] + kept)
    return y, _pick(table, num_present[:, None] + kept)


def _short_conv(
    x: Tensor, weight: Tensor, last: Tensor | None, mask: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Results; the present tokens behind w - 1 earlier ones, side by side; and, with a mask, their numbers."""
    _check(x, weight, last, mask)
    (b, n, c), before = x.shape, weight.shape[-1] - 1
    last = x.new_zeros(b, before, c) if last is None else last.to(x.dtype)
    taps = at_least_float32(weight[:, 0].T)
    if mask is None and offsets is None:
        table = torch.cat((last, x), dim=1)
        return _weigh(at_least_float32(table), taps).to(x.dtype), table, None

    # Present tokens go to slots side by side, behind w - 1 of their own for each sequence, and all others to a last slot.
    num_earlier = torch.arange(n, device=x.device).expand(b, n)
    if mask is not None:
        num_earlier = mask.cumsum(1) - mask.long()
    slots, num_slots = num_earlier + before, n + before
    if offsets is not None:
        check_offsets(offsets, b, n)
        number = torch.bucketize(torch.arange(n, device=x.device), offsets[1:].to(x.device), right=True)
        slots, num_slots = slots + before * number, n + before * (len(offsets) - 1)
    places = slots if mask is None else slots.masked_fill(~mask, num_slots)
    everything = torch.cat((last, x, x.new_zeros(b, 1, c)), dim=1)
    numbers = torch.arange(before + n, device=x.device).expand(b, -1)
    source = numbers.new_full((b, num_slots + 1), before + n)  # zeros, where nothing else comes
    source = source.scatter(1, torch.cat((numbers[:, :before], places), dim=1), numbers)[:, :num_slots]
    table = _pick(everything, source)
    earlier = _pick(_weigh(at_least_float32(table), taps[:-1]), slots - before)
    y = torch.addcmul(earlier, at_least_float32(x), taps[-1]).to(x.dtype)
    return y, table, None if mask is None else mask.sum(1)


def _weigh(table: Float[Tensor, "b n+w-1 c"], taps: Float[Tensor, "w c"]) -> Float[Tensor, "b n c"]:
    """Σ_i taps_i · table_{t + i} for each t.

    Shifted products: on a CPU conv1d with as many groups as features takes 1.3 to 1.8 times as long, forward and backward.
    """
    n = table.shape[1] - len(taps) + 1
    total = table[:, :n] * taps[0]
    for i in range(1, len(taps)):
        total = torch.addcmul(total, table[:, i : i + n], taps[i])
    return total


def _pick(x: Float[Tensor, "b s c"], index: Int[Tensor, "b n"]) -> Float[Tensor, "b n c"]:
    """Tokens of each row by their numbers. Whole rows: a gather of numbers one by one takes ten times as long."""
    b, s, _ = x.shape
    flat = index + s * torch.arange(b, device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, index.shape)


def _check(x: Tensor, weight: Tensor, last: Tensor | None, mask: Tensor | None) -> None:
    if weight.ndim != 3 or weight.shape[1] != 1 or weight.shape[2] < 2:
        raise ValueError(f"weight must be (c, 1, w) with w of at least 2, got {tuple(weight.shape)}")
    if x.ndim != 3 or x.shape[-1] != len(weight):
        raise ValueError(f"x must be (b, n, c) with c = {len(weight)}, got {tuple(x.shape)}")
    expected = (x.shape[0], weight.shape[2] - 1, x.shape[2])
    if last is not None and last.shape != expected:
        raise ValueError(f"the last inputs must be (b, w - 1, c) = {expected}, got {tuple(last.shape)}")
    expected = tuple(x.shape[:2])
    if mask is not None and (mask.shape != expected or mask.dtype != torch.bool):
        raise ValueError(
            f"mask must be bool of shape (b, n) = {expected}, True where a token is present; "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )


class ShortConv(nn.Module):
    """:func:`short_conv` with weights of its own, which at the start leave tokens as they are.

    Args:
        num_features: c, the width of tokens.
        width: w, the number of tokens that are weighed.

    Raises:
        ValueError: ``width`` is below 2.
    """

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        if width < 2:
            raise ValueError(f"a short convolution needs a width of at least 2, got {width}")
        # Of three axes, as conv1d's: optimizers for matrices leave it alone.
        self.weight = nn.Parameter(torch.zeros(num_features, 1, width))
        with torch.no_grad():
            self.weight[..., -1] = 1.0

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        *,
        mask: Bool[Tensor, "b n"] | None = None,
        offsets: Int[Tensor, " p+1"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        """As :func:`short_conv`."""
        return short_conv(x, self.weight, mask=mask, offsets=offsets)

    def stream(
        self, x: Float[Tensor, "b n c"], last: Tensor | None = None, *, mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b w-1 c"]]:
        """As :func:`stream_short_conv`."""
        return stream_short_conv(x, self.weight, last, mask=mask)

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.weight.shape[0]}, width={self.weight.shape[2]}"


def make_short_convs(
    width: int | None, query_features: int, key_features: int, *, causal: bool
) -> tuple[ShortConv | None, ShortConv | None, ShortConv | None]:
    """Make the convolutions of queries, of keys and of values, which are as wide as keys; None for each where ``width`` is.

    Raises:
        ValueError: ``width`` is below 2, or the attention is not causal.
    """
    if width is None:
        return None, None, None
    if not causal:
        raise ValueError(
            f"short_conv={width} would look one way, at earlier tokens, where causal=False looks both ways; "
            "give causal=True or short_conv=None"
        )
    return ShortConv(query_features, width), ShortConv(key_features, width), ShortConv(key_features, width)
