"""Relative positions for softmax attention: what they add to its logits."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class PositionBias(nn.Module, ABC):
    """What the positions of a query and a key add to their logit: softmax(q·k/√d + bias).

    A subclass sets ``num_heads`` and writes ``forward``. All layers that are given one object share it. A key whose bias is
    -inf is not attended to.

    Attributes:
        num_heads: h.
    """

    num_heads: int

    @abstractmethod
    def forward(
        self,
        query_positions: Int[Tensor, "*b n"],
        key_positions: Int[Tensor, "*b s"],
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "#b h n s"]:
        """Return the bias of each query and key in ``dtype``, one for all rows where positions are ``(n,)`` and ``(s,)``.

        Args:
            query_positions: In tokens.
            key_positions: In tokens.
            dtype: Of the result.

        Raises:
            ValueError: Positions that are not integers of these shapes.
        """


def relative_positions(
    query_positions: Int[Tensor, "*b n"], key_positions: Int[Tensor, "*b s"]
) -> Int[Tensor, "#b n s"]:
    """How many tokens each key stands before each query, t - s: int64, and so exact at any position.

    Raises:
        ValueError: Positions that are not integers of these shapes.
    """
    for name, positions in (("query_positions", query_positions), ("key_positions", key_positions)):
        is_integer = not (positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool)
        if positions.ndim not in (1, 2) or not is_integer:
            raise ValueError(
                f"{name} must be integers of shape (n,) or (b, n), "
                f"got {positions.dtype} of shape {tuple(positions.shape)}"
            )
    before = query_positions.long()[..., :, None] - key_positions.long()[..., None, :]
    return before if before.ndim == 3 else before[None]


class ALiBi(PositionBias):
    """Attention with linear biases: -slope·|t - s|, a slope for each head, nothing learned.

    Head i = 1 … h has the slope 2^(-8i/h). Where h is no power of two, the first p heads, p the largest power of two
    below h, have the slopes of p heads, and the others every second slope of 2p heads: the 1st, the 3rd, ….

    A weight is multiplied by exp(-slope·|t - s|) before weights are normalized. In causal linear attention the same is
    a decay of exp(-slope) a token, one for each head, in the sums of both numerator and normalizer.

    Args:
        num_heads: h.

    Raises:
        ValueError: ``num_heads`` is below 1.

    Source: Press et al. 2022 (arXiv 2108.12409), section 3; their published code where h is no power of two.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = _checked(num_heads)
        self.slopes = alibi_slopes(num_heads)

    def forward(  # noqa: D102
        self,
        query_positions: Int[Tensor, "*b n"],
        key_positions: Int[Tensor, "*b s"],
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "#b h n s"]:
        distance = relative_positions(query_positions, key_positions).abs()
        slopes = torch.tensor(self.slopes, dtype=dtype, device=distance.device)
        return distance.to(dtype)[:, None] * -slopes[:, None, None]

    def extra_repr(self) -> str:  # noqa: D102
        return f"num_heads={self.num_heads}"


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Slopes of :class:`ALiBi`, one a head, in 1/token."""
    power = 1 << (num_heads.bit_length() - 1)
    first, between = ([2 ** (-8 * i / p) for i in range(1, p + 1)] for p in (power, 2 * power))
    return (*first, *between[::2][: num_heads - power])


class T5Bias(PositionBias):
    """T5's relative positions: one learned number for each head and bucket of distances.

    Of the B buckets, those of the distances 0 … B/2 - 1 hold one distance each. The others widen with it: bucket B/2 + k
    begins at B/2·(``max_distance``/(B/2))^(2k/B), and the last one has no end. A bidirectional bias gives half of
    ``num_buckets`` to keys after the query and half to the others; one that is not has all keys after the query in
    bucket 0, and is for causal layers.

    The numbers begin at 0, as in a model without positions. T5's layers share one table, and its logits are not divided
    by √d; here they are.

    Args:
        num_heads: h.
        num_buckets: Number of buckets, in both directions together.
        max_distance: In tokens; all distances from here on share a bucket.
        bidirectional: Whether keys after the query are told from those before it.

    Raises:
        ValueError: ``num_heads`` is below 1, there are fewer than two buckets for a direction or an odd number for two,
            or ``max_distance`` lies among the buckets of one distance.

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1; their published code for the buckets.
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = False
    ) -> None:
        super().__init__()
        directions = 2 if bidirectional else 1
        if num_buckets < 2 * directions or num_buckets % directions:
            raise ValueError(
                f"num_buckets must be {'even and at least 4' if bidirectional else 'at least 2'}, got {num_buckets}"
            )
        if max_distance <= num_buckets // directions // 2:
            raise ValueError(
                f"max_distance must be above {num_buckets // directions // 2}, the number of buckets of one distance, "
                f"got {max_distance}"
            )
        self.num_heads, self.num_buckets, self.max_distance = _checked(num_heads), num_buckets, max_distance
        self.bidirectional = bidirectional
        self.starts = bucket_starts(num_buckets // directions, max_distance)
        # No random numbers are drawn: the model's other weights are those that it has without this.
        self.table = nn.Embedding.from_pretrained(torch.zeros(num_buckets, num_heads), freeze=False)

    def forward(  # noqa: D102
        self,
        query_positions: Int[Tensor, "*b n"],
        key_positions: Int[Tensor, "*b s"],
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "#b h n s"]:
        buckets = self.bucket(relative_positions(query_positions, key_positions))
        return self.table(buckets).movedim(-1, -3).to(dtype)

    def bucket(self, before: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Bucket of a key that stands ``before`` its query by so many tokens."""
        starts = torch.tensor(self.starts, device=before.device)
        distance = before.abs() if self.bidirectional else before.clamp_min(0)
        bucket = torch.bucketize(distance, starts, right=True)
        return bucket + (before < 0) * (self.num_buckets // 2) if self.bidirectional else bucket

    def extra_repr(self) -> str:  # noqa: D102
        return f"num_heads={self.num_heads}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


def bucket_starts(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """Least distance, in tokens, of each of T5's buckets but the first, which begins at 0.

    In whole numbers: a logarithm in floating point can put a distance that begins a bucket into the one before.
    """
    exact = num_buckets // 2
    wider = num_buckets - exact
    starts = list(range(1, exact + 1))
    for k in range(1, wider):
        least = starts[-1]
        while least**wider < exact ** (wider - k) * max_distance**k:
            least += 1
        starts.append(least)
    return tuple(starts)


def _checked(num_heads: int) -> int:
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    return num_heads
