"""Rotary position embedding: turn feature pairs by an angle proportional to their position."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linrope.transforms import is_transformed

Pairing = Literal["interleaved", "half"]


def inv_freq(width: int, base: float, *, device: torch.device | None = None) -> Float[Tensor, " pairs"]:
    """Angular frequencies ``base**(-2i/width)`` of the ``width/2`` pairs, in radians per token, float64.

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.2.2.
    """
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)


def rotate(
    features: Float[Tensor, "*batch n m"],
    positions: Int[Tensor, "*positions n"] | None = None,
    *,
    base: float = 10_000.0,
    fraction: float = 1.0,
    pairing: Pairing = "interleaved",
) -> Float[Tensor, "*batch n m"]:
    """Turn each feature pair by an angle proportional to its position.

    Pair ``i`` of the ``w = round(fraction * m)`` rotated features at position ``p`` turns by
    ``p * base**(-2i/w)`` radians, so the product of two rotated vectors depends on their distance
    alone. Rotated products can be negative.

    Angles, cosines and sines are computed in float64, whatever the dtype of ``features``: float32
    angles are off by 2.5e-2 at position 2**20.

    Args:
        features: Vectors to rotate, of any floating dtype.
        positions: Absolute positions in tokens, ``(n,)`` or with leading axes that are those of
            ``features`` counted from the left, so ``(b, n)`` goes with ``(b, h, n, m)``; 0, 1, … by default.
        base: Dimensionless; wavelengths run from 2π to 2π·base tokens.
        fraction: Share of the features that turn; the rest, the last ones, pass through. Frequencies
            come from the rotated width.
        pairing: ``"interleaved"`` joins features ``(2i, 2i+1)``, ``"half"`` joins ``(i, i + w/2)``.

    Returns:
        The rotated features, in the dtype of ``features``.

    Raises:
        ValueError: The rotated width is odd, ``fraction`` outside (0, 1], an unknown ``pairing``, or
            ``positions`` do not fit ``features``.

    Source: Su et al. 2021 (arXiv 2104.09864), eq. 34.
    """
    if pairing not in ("interleaved", "half"):
        raise ValueError(f"pairing must be 'interleaved' or 'half', got {pairing!r}")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction}")
    width = even_width(features.shape[-1], fraction)
    turns = _turns(features, positions, width, base)
    turn = turn_pairs if pairing == "interleaved" else _turn_halves
    return turn(features.to(turns.dtype), turns).to(features.dtype)


def turn_pairs(
    x: Float[Tensor, "*batch n m"], turns: Float[Tensor, "*#batch n w"], *, back: bool = False
) -> Float[Tensor, "*batch n m"]:
    """Turn the pairs (2i, 2i+1) of the first w features by the angles whose cosine and sine are ``turns``, or ``back``."""
    width = turns.shape[-1]
    pairs, turns = x[..., :width].unflatten(-1, (-1, 2)), turns.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # compilers and exporters know no complex numbers
        (first, second), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
        sin = -sin if back else sin
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    else:  # one complex product: a fifth of the time of four real ones on a CPU
        factor = torch.view_as_complex(turns)
        pairs = pairs.contiguous()
        pairs = pairs.clone() if pairs.storage_offset() % 2 else pairs  # complex numbers begin at even places
        turned = torch.view_as_real(torch.view_as_complex(pairs) * (factor.conj() if back else factor))
    return _with_the_rest(turned.flatten(-2), x)


def _turn_halves(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs (i, i + w/2)."""
    first, second = x[..., : turns.shape[-1]].chunk(2, dim=-1)
    cos, sin = turns[..., 0::2], turns[..., 1::2]
    return _with_the_rest(torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1), x)


def _with_the_rest(turned: Tensor, x: Tensor) -> Tensor:
    """The turned features, and those behind them that pass through."""
    width = turned.shape[-1]
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def rotated_width(num_features: int, fraction: float) -> int:
    """Number of features, of ``num_features``, that a rotation of this ``fraction`` turns."""
    return round(fraction * num_features)


def even_width(num_features: int, fraction: float) -> int:
    """:func:`rotated_width`; ValueError if pairs cannot be made of it."""
    width = rotated_width(num_features, fraction)
    if width % 2:
        raise ValueError(f"rotation needs an even width, got {width} ({fraction:g} of the {num_features} features)")
    return width


def _turns(features: Tensor, positions: Tensor | None, width: int, base: float) -> Tensor:
    """Cosine and sine of each pair in turn, to broadcast against the first ``width`` features; float32 or wider."""
    n, dtype = features.shape[-2], torch.promote_types(features.dtype, torch.float32)
    if positions is None:
        return (_first_turns if _may_be_kept(features) else _first_turns.__wrapped__)(
            n, width, base, features.device, dtype
        )
    leading = positions.shape[:-1]
    fits = positions.ndim >= 1 and positions.shape[-1] == n and len(leading) <= features.ndim - 2
    if not fits or any(p not in (1, f) for p, f in zip(leading, features.shape, strict=False)):
        raise ValueError(
            f"positions must be (n,) or (b, n) for features of shape {tuple(features.shape)} "
            f"with n = {n}, got {tuple(positions.shape)}"
        )
    axes_between = (1,) * (features.ndim - 1 - positions.ndim) if leading else ()
    return _make_turns(positions.reshape(*leading, *axes_between, n), width, base, features.device, dtype)


def _may_be_kept(x: Tensor) -> bool:
    """Whether what is made for ``x`` may be kept: what a compiler, a transform or a fake mode makes must not outlive it."""
    return type(x) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling() and not is_transformed()


@lru_cache(maxsize=2)
def _first_turns(n: int, width: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The turns of positions 0, 1, …, n - 1: all layers of a model share them."""
    with torch.inference_mode(False), torch.no_grad():  # a training step may come after inference
        return _make_turns(torch.arange(n, device=device), width, base, device, dtype)


@lru_cache(maxsize=8)
def _frequencies(width: int, base: float, *, device: torch.device) -> Tensor:
    """:func:`inv_freq`, made once: in generation every token asks for it."""
    with torch.inference_mode(False), torch.no_grad():
        return inv_freq(width, base, device=device)


def _make_turns(positions: Tensor, width: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Apple's GPUs have no float64, so the angles are made on the CPU there.
    wide = torch.device("cpu") if device.type == "mps" else device
    frequencies = (_frequencies if _may_be_kept(positions) else inv_freq)(width, base, device=wide)
    angle = positions.to(wide, torch.float64)[..., None] * frequencies
    return torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(-2).to(device, dtype)


class Rotary(nn.Module):
    """The settings of a rotation, as one object that all layers of a model can share.

    It holds no tensors: tables are derived from the positions, in float64, and those of positions 0, 1, …
    are kept for the next call, which is that of the next layer. So it has nothing to save, nothing to cast
    and nothing that an earlier call could leave stale.

    Args:
        base: Dimensionless; wavelengths run from 2π to 2π·base tokens.
        fraction: Share of the features that turn, in (0, 1]; frequencies come from the rotated width.
        pairing: ``"interleaved"`` joins features ``(2i, 2i+1)``, ``"half"`` joins ``(i, i + w/2)``.
        scaling: Reserved for context-extension schemes; none is implemented, so only ``None`` is accepted.

    Raises:
        ValueError: ``base`` is not positive, ``fraction`` outside (0, 1], an unknown ``pairing`` or a
            ``scaling``.

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.2.2.
    """

    def __init__(
        self,
        base: float = 10_000.0,
        fraction: float = 1.0,
        pairing: Pairing = "interleaved",
        scaling: None = None,
    ) -> None:
        super().__init__()
        if not base > 0:
            raise ValueError(f"base must be positive, got {base}")
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must lie in (0, 1], got {fraction}")
        if pairing not in ("interleaved", "half"):
            raise ValueError(f"pairing must be 'interleaved' or 'half', got {pairing!r}")
        if scaling is not None:
            raise ValueError(f"scaling must be None, got {scaling!r}")
        self.base, self.fraction, self.scaling = float(base), float(fraction), scaling
        self.pairing: Pairing = pairing

    def forward(
        self, features: Float[Tensor, "*batch n m"], positions: Int[Tensor, "*positions n"] | None = None
    ) -> Float[Tensor, "*batch n m"]:
        """Rotate ``features`` to their ``positions`` (tokens); see :func:`rotate`."""
        return rotate(features, positions, base=self.base, fraction=self.fraction, pairing=self.pairing)

    def turns(
        self, features: Float[Tensor, "b h n m"], positions: Int[Tensor, "*b n"] | None = None
    ) -> Float[Tensor, "#b 1 n w"]:
        """Cosine and sine of the angle of each pair in turn, for those w of the m features that turn; not to be written to.

        Raises:
            ValueError: As :func:`rotate`.
        """
        width = even_width(features.shape[-1], self.fraction)
        turns = _turns(features, positions, width, self.base)
        return turns if turns.ndim == 4 else turns[None, None]

    def for_width(self, num_features: int) -> Rotary:
        """Return this rotation, or where it would turn an odd number of features, one that turns one fewer.

        Raises:
            ValueError: Not one pair is left to turn.
        """
        width = rotated_width(num_features, self.fraction)
        if width < 2:
            raise ValueError(
                f"rotation needs at least one pair, got {width} ({self.fraction:g} of {num_features} features)"
            )
        if width % 2 == 0:
            return self
        return Rotary(self.base, (width - 1) / num_features, self.pairing)

    def extra_repr(self) -> str:  # noqa: D102
        return f"base={self.base:g}, fraction={self.fraction:g}, pairing={self.pairing!r}"
