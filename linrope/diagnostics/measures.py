"""What the explicit weights of attention say."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float
from torch import Tensor

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class Diagnostics:
    """What one layer does, for each of its h heads: float64, averaged over sequences and queries unless said otherwise.

    The output of query t is Σ_s W_ts v_s. The weights W of linear attention rotated in the numerator may be negative and
    need not sum to 1; |W| normalized to sum 1 takes the place of probabilities where those are needed.

    Attributes:
        row_sums: Quantiles of Σ_s W_ts over all queries, at :data:`QUANTILES`; 1 without a rotation in the numerator.
        negative_share: Share of the attended pairs whose weight is below 0.
        growth: Largest Σ_s |W_ts| of any query: by how much the values may be magnified. 1 for averages.
        smallest_normalizer: Smallest Σ_s φ(q_t)·φ(k_s) / Σ_s ‖φ(q_t)‖‖φ(k_s)‖ of any query, at most 1: the nearer to 0, the
            more the division magnifies what rotation leaves, and its rounding. NaN where nothing is divided by it.
        entropy: -Σ_s p_ts ln p_ts in nats, of p = |W| normalized; ln n where all of n keys count alike.
        effective_rank: exp of the entropy of W's normalized singular values: between 1 and n.
        distance: Σ_s p_ts |t - s| in tokens, t and s the positions.
        softmax_error: ‖W - A‖ / ‖A‖, Frobenius norms, of A = softmax(q·k/√d) of the same queries and keys, rotated where
            the layer rotates and a pair of them turns; 0 for softmax itself, NaN where W is not normalized by features.

    Source: Roy and Vetterli 2007 for the effective rank.
    """

    row_sums: Float[Tensor, "h quantiles"]
    negative_share: Float[Tensor, " h"]
    growth: Float[Tensor, " h"]
    smallest_normalizer: Float[Tensor, " h"]
    entropy: Float[Tensor, " h"]
    effective_rank: Float[Tensor, " h"]
    distance: Float[Tensor, " h"]
    softmax_error: Float[Tensor, " h"]

    def means(self) -> dict[str, float]:
        """One number for each measure, over heads; for row sums the mean distance of their quantiles from 1."""
        numbers = {field.name: getattr(self, field.name).mean().item() for field in fields(self)}
        return numbers | {"row_sums": (self.row_sums - 1).abs().mean().item()}


@dataclass(frozen=True)
class Weights:
    """The explicit weights of one call of a layer, in float64.

    Attributes:
        weights: W, of key s for query t.
        attended: True where query t may attend to key s.
        apart: |t - s| in tokens.
        softmax: The weights of softmax, of the same queries and keys; None where W is not normalized by features.
        normalizer: Σ_s φ(q_t)·φ(k_s) / Σ_s ‖φ(q_t)‖‖φ(k_s)‖; None where nothing is divided by it.
        unrotated: W without the rotation in the numerator, divided by the same; None where there is no such rotation.
    """

    weights: Float[Tensor, "b h n s"]
    attended: Bool[Tensor, "b 1 n s"]
    apart: Float[Tensor, "#b 1 n s"]
    softmax: Float[Tensor, "b h n s"] | None
    normalizer: Float[Tensor, "b h n"] | None
    unrotated: Float[Tensor, "b h n s"] | None = None

    def measure(self) -> Diagnostics:
        """Reduce to numbers.

        Raises:
            ValueError: No query has a key to attend to.
        """
        w, (b, h, n, s) = self.weights, self.weights.shape
        valid = self.attended.any(-1)  # queries with something to attend to, b 1 n
        if not valid.any():
            raise ValueError(f"no query has a key to attend to: {n} queries, {s} keys, of which none takes part")
        size, least = w.abs(), torch.finfo(w.dtype).tiny
        p = size / size.sum(-1, keepdim=True).clamp_min(least)
        pairs = self.attended.expand(b, h, n, s)
        finite = w.isfinite().all(-1).all(-1)
        values = torch.linalg.svdvals(w.nan_to_num())
        spectrum = values / values.sum(-1, keepdim=True).clamp_min(least)
        rank = (-torch.xlogy(spectrum, spectrum).sum(-1)).exp().masked_fill(~finite, torch.nan)
        nan = w.new_full((h,), torch.nan)

        def mean(of_queries: Tensor) -> Tensor:
            return (of_queries * valid).sum((0, 2)) / valid.sum()

        return Diagnostics(
            row_sums=torch.quantile(w.sum(-1).transpose(0, 1)[:, valid[:, 0]], w.new_tensor(QUANTILES), dim=-1).mT,
            negative_share=((w < 0) & pairs).sum((0, 2, 3)) / pairs.sum((0, 2, 3)),
            growth=size.sum(-1).amax((0, 2)),
            smallest_normalizer=nan
            if self.normalizer is None
            else self.normalizer.masked_fill(~valid, torch.inf).amin((0, 2)),
            entropy=mean(-torch.xlogy(p, p).sum(-1)),
            effective_rank=rank.mean(0),
            distance=mean((p * self.apart).sum(-1)),
            softmax_error=nan
            if self.softmax is None
            else ((w - self.softmax).norm(dim=(-2, -1)) / self.softmax.norm(dim=(-2, -1))).mean(0),
        )
