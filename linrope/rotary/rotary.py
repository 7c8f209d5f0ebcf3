"""Rotary position embedding: turn feature pairs by an angle proportional to their position."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linrope.rotary.kept import may_be_kept
from linrope.rotary.rotation import Rotation
from linrope.rotary.scaling import Scaling, inv_freq
from linrope.rotary.turning import Pairing


class Rotary(Rotation):
    """Rotary positions: pair i of the w rotated features at position p turns by p·base^(-2i/w).

    The settings of a rotation, as one object that all layers of a model can share: it holds no tensors, so it has
    nothing to save, nothing to cast and nothing that an earlier call could leave stale.

    Args:
        base: Dimensionless; wavelengths run from 2π to 2π·base tokens. Several: one for each head.
        fraction: Share of the features that turn, in (0, 1]; frequencies come from the rotated width.
        pairing: ``"interleaved"`` joins features ``(2i, 2i+1)``, ``"half"`` joins ``(i, i + w/2)``.
        scaling: How frequencies change for texts longer than those of training; None: not at all.

    Raises:
        ValueError: ``base`` is not positive, ``fraction`` outside (0, 1], an unknown ``pairing``, or a ``scaling`` that
            is none.

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.2.2.
    """

    def __init__(
        self,
        base: float | Sequence[float] = 10_000.0,
        fraction: float = 1.0,
        pairing: Pairing = "interleaved",
        scaling: Scaling | None = None,
    ) -> None:
        bases = tuple(float(x) for x in base) if isinstance(base, Sequence) else (float(base),)
        if not bases or not all(x > 0 for x in bases):
            raise ValueError(f"base must be positive, got {base}")
        if scaling is not None and not isinstance(scaling, Scaling):
            raise ValueError(f"scaling must be a linrope.Scaling or None, got {scaling!r}")
        super().__init__(fraction, pairing, len(bases) if isinstance(base, Sequence) else None)
        self.base = bases if isinstance(base, Sequence) else bases[0]
        self.scaling = scaling

    def with_scaling(self, scaling: Scaling | None) -> Rotary:
        """Return this rotation under another scaling."""
        return self.changed(scaling=scaling)

    def inv_freq(
        self, width: int, seq_len: Float[Tensor, "*b"] | int = 0, *, device: torch.device | None = None
    ) -> Float[Tensor, "*b pairs"]:
        """Frequency of each of ``width/2`` pairs in radians per token, float64, in a text of ``seq_len`` tokens.

        Frequencies of heads fill the last axis of ``seq_len``, or are an axis of their own where it has none.
        """
        length = torch.as_tensor(seq_len, dtype=torch.float64, device=device)
        return _frequencies(width, self.base, self.scaling, length)

    def angles(self, positions: Tensor, width: int, seq_len: Tensor) -> Tensor:  # noqa: D102
        if not self.is_dynamic and may_be_kept(positions):
            frequencies = _kept_frequencies(width, self.base, self.scaling, positions.device)
        else:
            frequencies = _frequencies(width, self.base, self.scaling, seq_len)
        return positions[..., None] * frequencies[..., None, :]

    @property
    def settings(self) -> Hashable:  # noqa: D102
        return self.base, self.scaling

    @property
    def is_dynamic(self) -> bool:  # noqa: D102
        return self.scaling is not None and self.scaling.is_dynamic

    @property
    def attention_factor(self) -> float:  # noqa: D102
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    def extra_repr(self) -> str:  # noqa: D102
        base = f"{self.base:g}" if isinstance(self.base, float) else self.base
        return f"base={base}, {super().extra_repr()}" + (f", scaling={self.scaling}" if self.scaling else "")


def rotate(
    features: Float[Tensor, "*batch n m"],
    positions: Int[Tensor, "*positions n"] | None = None,
    *,
    base: float | Sequence[float] = 10_000.0,
    fraction: float = 1.0,
    pairing: Pairing = "interleaved",
    scaling: Scaling | None = None,
) -> Float[Tensor, "*batch n m"]:
    """Turn each feature pair by an angle proportional to its position: :class:`Rotary` as a function.

    Pair ``i`` of the ``w = round(fraction * m)`` rotated features at position ``p`` turns by
    ``p * base**(-2i/w)`` radians, so the product of two rotated vectors depends on their distance
    alone. Rotated products can be negative.

    Angles, cosines and sines are computed in float64, whatever the dtype of ``features``: float32
    angles are off by 2.5e-2 at position 2**20.

    Args:
        features: Vectors to rotate, of any floating dtype.
        positions: As in :meth:`Rotary.forward`.
        base: As in :class:`Rotary`.
        fraction: As in :class:`Rotary`.
        pairing: As in :class:`Rotary`.
        scaling: As in :class:`Rotary`.

    Returns:
        The rotated features, in the dtype of ``features``.

    Raises:
        ValueError: As :class:`Rotary` and its call.

    Source: Su et al. 2021 (arXiv 2104.09864), eq. 34.
    """
    return Rotary(base, fraction, pairing, scaling)(features, positions)


def _frequencies(width: int, base: float | tuple[float, ...], scaling: Scaling | None, seq_len: Tensor) -> Tensor:
    """Frequencies of one base, or of each head's along the last axis but one."""
    if isinstance(base, tuple):
        of_heads = [_frequencies(width, x, scaling, seq_len) for x in base]
        return torch.stack(of_heads) if of_heads[0].ndim == 1 else torch.cat(of_heads, dim=-2)
    device = seq_len.device
    return inv_freq(width, base, device=device) if scaling is None else scaling.inv_freq(width, base, seq_len)


@lru_cache(maxsize=8)
def _kept_frequencies(
    width: int, base: float | tuple[float, ...], scaling: Scaling | None, device: torch.device
) -> Tensor:
    """:func:`_frequencies` that no length changes, made once: in generation every token asks for them."""
    with torch.inference_mode(False), torch.no_grad():
        return _frequencies(width, base, scaling, torch.zeros((), dtype=torch.float64, device=device))
