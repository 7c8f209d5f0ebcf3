"""What all rotations have in common: angles from positions, and queries and keys of one text."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linrope.rotary.kept import may_be_kept, once
from linrope.rotary.turning import Pairing, turn


class Rotation(nn.Module, ABC):
    """Turns feature pairs by angles that grow with the position: the contract, and what follows from it.

    Tables of cosines and sines are derived from the positions, in float64. Those last made are kept for the next call,
    which is that of the next layer: for positions 0, 1, …, and for the same tensor of positions.

    Args:
        fraction: Share of the features that turn, in (0, 1]; frequencies come from the rotated width.
        pairing: ``"interleaved"`` joins features ``(2i, 2i+1)``, ``"half"`` joins ``(i, i + w/2)``.
        num_heads: Heads that have frequencies of their own; None: all have the same.

    Raises:
        ValueError: ``fraction`` outside (0, 1], or an unknown ``pairing``.
    """

    multiple: ClassVar[int] = 2
    """The rotated width is a multiple of this."""

    def __init__(self, fraction: float, pairing: Pairing, num_heads: int | None = None) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must lie in (0, 1], got {fraction}")
        if pairing not in ("interleaved", "half"):
            raise ValueError(f"pairing must be 'interleaved' or 'half', got {pairing!r}")
        self.fraction = float(fraction)
        self.pairing: Pairing = pairing
        self.num_heads = num_heads

    @abstractmethod
    def angles(
        self, positions: Float[Tensor, "*axes n"], width: int, seq_len: Float[Tensor, "*axes"]
    ) -> Float[Tensor, "*axes n pairs"]:
        """Angle of each of the ``width/2`` pairs at ``positions`` of a text of ``seq_len`` tokens, in radians, float64.

        ``seq_len`` may have no axes; frequencies of heads come as one more axis, where positions hold 1 or none.
        """

    @property
    def settings(self) -> Hashable | None:
        """What the angles depend on beside positions and width, to be compared; None where that may change."""
        return None

    @property
    def is_dynamic(self) -> bool:
        """Whether angles depend on the length of the text: then there is no stream, whose length grows."""
        return False

    def rates(self, num_features: int) -> tuple[float, ...] | None:
        """How fast the part of each feature in the numerator decays, in 1/token: by exp(-rate · distance); None: not at all.

        What decays turns queries otherwise than keys, so it stands in the numerator of causal attention alone.
        """
        return None

    @property
    def attention_factor(self) -> float:
        """What :meth:`before` multiplies queries and keys with; 1 but for some scalings."""
        return 1.0

    def forward(
        self,
        features: Float[Tensor, "*batch n m"],
        positions: Int[Tensor, "*positions n"] | None = None,
        *,
        seq_len: Float[Tensor, "*b"] | None = None,
    ) -> Float[Tensor, "*batch n m"]:
        """Turn each feature pair by the angle of its position; lengths of vectors stay.

        Args:
            features: Vectors to rotate, of any floating dtype.
            positions: In tokens, ``(n,)`` or with leading axes that are those of ``features`` counted from
                the left, so ``(b, n)`` goes with ``(b, h, n, m)``; 0, 1, … by default.
            seq_len: Length of each text in tokens, for rotations that depend on it; by default from the first
                position to the last.

        Returns:
            The rotated features, in the dtype of ``features``.

        Raises:
            ValueError: The rotated width makes no pairs, or ``positions`` or heads do not fit.
        """
        return turn(features, self._turns(features, positions, seq_len), self.pairing).to(features.dtype)

    def turns(
        self,
        features: Float[Tensor, "b h n m"],
        positions: Int[Tensor, "*b n"] | None = None,
        seq_len: Float[Tensor, "*b"] | None = None,
    ) -> Float[Tensor, "#b #h n w"]:
        """Cosine and sine of the angle of each pair in turn, for those w of the m features that turn; not to be written to.

        Raises:
            ValueError: As :meth:`forward`.
        """
        turns = self._turns(features, positions, seq_len)
        return turns[(None,) * (4 - turns.ndim)]

    def before(
        self,
        query: Float[Tensor, "b h n d"],
        key: Float[Tensor, "b h s d"],
        query_positions: Int[Tensor, "*b n"] | None = None,
        key_positions: Int[Tensor, "*b s"] | None = None,
        key_mask: Bool[Tensor, "b s"] | None = None,
    ) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b h s d"]]:
        """Queries and keys of one text turned, and scaled by :attr:`attention_factor`: for a softmax or a map that follows."""
        seq_len = self.common_length(query, key, query_positions, key_positions, key_mask)
        length = {} if seq_len is None else {"seq_len": seq_len}
        query, key = self(query, query_positions, **length), self(key, key_positions, **length)
        factor = self.attention_factor
        return (query, key) if factor == 1 else (query * factor, key * factor)

    def common_length(
        self,
        query: Float[Tensor, "b h n d"],
        key: Float[Tensor, "b h s d"],
        query_positions: Int[Tensor, "*b n"] | None,
        key_positions: Int[Tensor, "*b s"] | None,
        key_mask: Bool[Tensor, "b s"] | None,
    ) -> Float[Tensor, "*b"] | None:
        """Length of each text, from the first position to the last, of queries and keys; None where nothing depends on it.

        Masked keys do not count, nor do the queries beside them where there are as many.
        """
        n, s = query.shape[-2], key.shape[-2]
        if not self.is_dynamic or n == 0 or s == 0:
            return None
        if query_positions is key_positions is key_mask is None and n == s:
            return None  # the default, for which tables are kept
        firsts, lasts = [], []
        for at, size in ((query_positions, n), (key_positions, s)):
            at = (torch.arange(size, device=query.device) if at is None else at).to(torch.float64)
            if key_mask is not None and key_mask.shape[-1] == size:
                firsts.append(at.masked_fill(~key_mask, torch.inf).amin(-1))
                lasts.append(at.masked_fill(~key_mask, -torch.inf).amax(-1))
            else:
                firsts.append(at.amin(-1))
                lasts.append(at.amax(-1))
        length = torch.maximum(*lasts) - torch.minimum(*firsts) + 1
        return length.clamp_min(1)  # that of a text without a key is -inf

    def for_width(self, num_features: int) -> Rotation:
        """Return this rotation, or where it would turn features that make no pairs, one that turns fewer.

        Raises:
            ValueError: Not one pair is left to turn.
        """
        width = rotated_width(num_features, self.fraction)
        if width < self.multiple:
            least = "one pair" if self.multiple == 2 else f"{self.multiple} features"
            raise ValueError(
                f"rotation needs at least {least}, got {width} ({self.fraction:g} of {num_features} features)"
            )
        excess = width % self.multiple
        return self.changed(fraction=(width - excess) / num_features) if excess else self

    def changed(self, **settings: Any) -> Any:
        """Return a copy with other settings."""
        other = copy.copy(self)
        for name, value in settings.items():
            setattr(other, name, value)
        return other

    def _turns(self, features: Tensor, positions: Tensor | None, seq_len: Tensor | None) -> Tensor:
        """Cosine and sine of each pair in turn, to broadcast against the first features; float32 or wider."""
        width = self._fitting_width(features, positions)
        dtype = torch.promote_types(features.dtype, torch.float32)
        if self.settings is None or seq_len is not None or not may_be_kept(features, positions):
            return self._make(features, positions, seq_len, width, dtype)
        key = type(self), self.settings, features.shape[-2], features.ndim, width, features.device, dtype
        return once(key, positions, lambda: self._make(features, positions, seq_len, width, dtype))

    def _make(
        self, features: Tensor, positions: Tensor | None, seq_len: Tensor | None, width: int, dtype: torch.dtype
    ) -> Tensor:
        # Apple's GPUs have no float64, so the angles are made on the CPU there.
        device = torch.device("cpu") if features.device.type == "mps" else features.device
        n = features.shape[-2]
        at = torch.arange(n, device=device) if positions is None else positions.to(device)
        at = at.to(torch.float64)
        if seq_len is not None:
            seq_len = seq_len.to(device, torch.float64)
        elif positions is None or not self.is_dynamic or n == 0:
            seq_len = torch.scalar_tensor(n, dtype=torch.float64, device=device)
        else:
            seq_len = at.amax(-1) - at.amin(-1) + 1
        # Axes of positions are those of features from the left: the others come between them and the tokens.
        at = _with_axes(at, features.ndim - 1, 1) if at.ndim > 1 else at
        angle = self.angles(at, width, _with_axes(seq_len, features.ndim - 2, 0) if seq_len.ndim else seq_len)
        return torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(-2).to(features.device, dtype)

    def _fitting_width(self, features: Tensor, positions: Tensor | None) -> int:
        """Return how many features turn; refuse what does not fit."""
        if not features.is_floating_point():
            raise ValueError(f"features must be floating, got {features.dtype}")
        if positions is not None and (positions.dtype == torch.bool or positions.is_complex()):
            raise ValueError(f"positions must be numbers of tokens, got {positions.dtype}")
        width = rotated_width(features.shape[-1], self.fraction)
        if width % self.multiple:
            fitting = "an even width" if self.multiple == 2 else f"a width that is a multiple of {self.multiple}"
            raise ValueError(
                f"rotation needs {fitting}, got {width} ({self.fraction:g} of the {features.shape[-1]} features)"
            )
        if self.num_heads is not None and (features.ndim < 3 or features.shape[-3] != self.num_heads):
            raise ValueError(
                f"features must be (b, h, n, m) of the {self.num_heads} heads that have frequencies, "
                f"got {tuple(features.shape)}"
            )
        if positions is None:
            return width
        n, leading = features.shape[-2], positions.shape[:-1]
        fits = positions.ndim >= 1 and positions.shape[-1] == n and len(leading) <= features.ndim - 2
        if not fits or any(p not in (1, f) for p, f in zip(leading, features.shape, strict=False)):
            raise ValueError(
                f"positions must be (n,) or (b, n) for features of shape {tuple(features.shape)} "
                f"with n = {n}, got {tuple(positions.shape)}"
            )
        return width

    def extra_repr(self) -> str:  # noqa: D102
        return f"fraction={self.fraction:g}, pairing={self.pairing!r}"


def check_rotary(rotary: Any, num_heads: int) -> None:
    """Refuse what is no rotation, or one with frequencies for another number of heads.

    Raises:
        ValueError: It is one.
    """
    if rotary is not None and not isinstance(rotary, Rotation):
        raise ValueError(f"rotary must be a linrope.Rotation or None, got {rotary!r}")
    if rotary is not None and rotary.num_heads not in (None, num_heads):
        raise ValueError(f"rotary has frequencies for {rotary.num_heads} heads, the layer has {num_heads}")


def check_streams(rotary: Any) -> None:
    """Refuse a stream to a rotation whose frequencies change as the text grows.

    Raises:
        ValueError: It is one.
    """
    if isinstance(rotary, Rotation) and rotary.is_dynamic:
        raise ValueError(
            f"{rotary} turns by frequencies that change with the length of the text, and a state holds keys turned by "
            "those of a shorter one: give the scaling the seq_len that it shall reach, or take one that is not dynamic"
        )


def rotated_width(num_features: int, fraction: float) -> int:
    """Number of features, of ``num_features``, that a rotation of this ``fraction`` turns."""
    return round(fraction * num_features)


def _with_axes(x: Tensor, ndim: int, last: int) -> Tensor:
    """``x`` with axes of 1 before its ``last`` ones, so that it has ``ndim``."""
    return x[(..., *(None,) * (ndim - x.ndim), *(slice(None),) * last)]
