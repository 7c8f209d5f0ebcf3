"""How the frequencies of a rotation change for texts longer than those of training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


def inv_freq(width: int, base: float, *, device: torch.device | None = None) -> Float[Tensor, " pairs"]:
    """Angular frequencies ``base**(-2i/width)`` of the ``width/2`` pairs, in radians per token, float64.

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.2.2.
    """
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)


class Scaling(ABC):
    """Settings alone, without tensors; equal ones make equal frequencies, and share them: subclasses are frozen dataclasses."""

    @property
    def attention_factor(self) -> float:
        """What queries and keys are each multiplied by where a softmax follows, or a feature map.

        In the numerator of linear attention it has no place: it would scale outputs, not sharpen weights.
        """
        return 1.0

    @property
    def is_dynamic(self) -> bool:
        """Whether the frequencies depend on the length of the text, tokens from the first to the last."""
        return False

    @abstractmethod
    def inv_freq(self, width: int, base: float, seq_len: Float[Tensor, "*b"]) -> Float[Tensor, "*b pairs"]:
        """Scaled frequencies of ``width/2`` pairs in radians per token, float64.

        Args:
            width: Features that turn.
            base: Of the unscaled frequencies.
            seq_len: Length of each text in tokens, float64, on the device that the frequencies are wanted on; its axes
                are theirs where the scaling is dynamic, and ignored where it is not.
        """


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation: every frequency divided by ``factor``, so that positions keep to the trained range.

    Source: Chen et al. 2023 (arXiv 2306.15595), eq. 4.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def inv_freq(self, width: int, base: float, seq_len: Tensor) -> Tensor:  # noqa: D102
        return inv_freq(width, base, device=seq_len.device) / self.factor


@dataclass(frozen=True)
class NTKScaling(Scaling):
    """NTK-aware: the base becomes base·factor^(w/(w - 2)) for w features that turn.

    The highest frequency stays, the lowest is divided by ``factor``, those between by powers of it.

    Source: bloc97 2023 (reddit, "NTK-Aware Scaled RoPE"); Peng et al. 2023 (arXiv 2309.00071), eq. 16.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def inv_freq(self, width: int, base: float, seq_len: Tensor) -> Tensor:  # noqa: D102
        return _ntk(width, base, seq_len.new_tensor(self.factor), "NTKScaling")


@dataclass(frozen=True)
class DynamicNTKScaling(Scaling):
    """NTK-aware scaling by as much as the text is longer than those of training.

    For L tokens, and L₀ of training, :class:`NTKScaling` with factor·L/L₀ - (factor - 1), or 1 where L ≤ L₀.
    Nothing is remembered: a short text after a long one gets the frequencies of a short one. A stream, whose earlier
    keys turned by the frequencies of a shorter text, is refused unless ``seq_len`` fixes the length.

    Args:
        original_seq_len: L₀, in tokens.
        factor: How fast the scaling grows with L; 1 scales by L/L₀ itself.
        seq_len: L for every text, in tokens; None: that of each text.

    Source: emozilla 2023 (reddit, "Dynamically Scaled RoPE"); Peng et al. 2023 (arXiv 2309.00071), section 3.3.
    """

    original_seq_len: int
    factor: float = 1.0
    seq_len: int | None = None

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_lengths(self.original_seq_len, self.seq_len)

    @property
    def is_dynamic(self) -> bool:  # noqa: D102
        return self.seq_len is None

    def inv_freq(self, width: int, base: float, seq_len: Tensor) -> Tensor:  # noqa: D102
        length = seq_len if self.seq_len is None else seq_len.new_tensor(self.seq_len)
        factor = self.factor * length.clamp_min(self.original_seq_len) / self.original_seq_len - (self.factor - 1)
        return _ntk(width, base, factor, "DynamicNTKScaling")


@dataclass(frozen=True)
class YaRN(Scaling):
    """NTK by parts: pairs that turn often within a trained text stay, those that do not turn once are interpolated.

    A pair turns r = L₀·inv_freq/2π times within the L₀ tokens of training. From the pair with ``beta_fast`` turns
    (rounded down to a whole one, as in the authors' code) to that with ``beta_slow`` (rounded up) the share of
    interpolation, inv_freq/factor, rises linearly with the pair's index from 0 to 1. The paper's own ramp (eq. 18) is
    linear in r instead; the two agree at both ends.

    Args:
        factor: Text length over that of training.
        original_seq_len: L₀, in tokens.
        beta_fast: Turns from which on a pair is left as it is.
        beta_slow: Turns up to which it is interpolated.
        softmax_factor: The :attr:`attention_factor`; 0.1·ln(factor) + 1 by default (eq. 22).

    Source: Peng et al. 2023 (arXiv 2309.00071), sections 3.2 and 3.4.
    """

    factor: float
    original_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    softmax_factor: float | None = None

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_lengths(self.original_seq_len)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_slow must be above 0 and below beta_fast, got {self.beta_slow:g} and {self.beta_fast:g}"
            )
        _check_softmax_factor(self.softmax_factor)

    @property
    def attention_factor(self) -> float:  # noqa: D102
        return 0.1 * math.log(self.factor) + 1 if self.softmax_factor is None else self.softmax_factor

    def inv_freq(self, width: int, base: float, seq_len: Tensor) -> Tensor:  # noqa: D102
        if base <= 1:
            raise ValueError(f"YaRN needs a base above 1, got {base:g}")

        def pair_that_turns(times: float) -> float:
            return width * math.log(self.original_seq_len / (times * 2 * math.pi)) / (2 * math.log(base))

        first = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        last = min(math.ceil(pair_that_turns(self.beta_slow)), width - 1)
        pair = torch.arange(width // 2, dtype=torch.float64, device=seq_len.device)
        # Where both ends are one pair, it stays, and the next is interpolated.
        interpolated = ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)
        frequency = inv_freq(width, base, device=seq_len.device)
        return frequency * (1 - interpolated) + frequency / self.factor * interpolated


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Long wavelengths divided by ``factor``, short ones left, those between interpolated, as in Llama 3.1.

    A pair turns r = L₀·inv_freq/2π times within the L₀ tokens of training; the share of the unscaled frequency is
    (r - low)/(high - low), within [0, 1].

    Args:
        factor: Divides the lowest frequencies.
        original_seq_len: L₀, in tokens.
        low_freq_factor: Turns up to which a pair is divided by ``factor``.
        high_freq_factor: Turns from which on it is left as it is.

    Source: Grattafiori et al. 2024 (arXiv 2407.21783); Meta's code of Llama 3.1 (``apply_scaling``).
    """

    factor: float
    original_seq_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_lengths(self.original_seq_len)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "low_freq_factor must be above 0 and below high_freq_factor, "
                f"got {self.low_freq_factor:g} and {self.high_freq_factor:g}"
            )

    def inv_freq(self, width: int, base: float, seq_len: Tensor) -> Tensor:  # noqa: D102
        frequency = inv_freq(width, base, device=seq_len.device)
        turns = self.original_seq_len * frequency / (2 * math.pi)
        unscaled = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequency * unscaled + frequency / self.factor * (1 - unscaled)


@dataclass(frozen=True)
class LongRoPE(Scaling):
    """Each pair's frequency divided by a factor of its own, found by search: one list up to the trained length, one past it.

    Where the lists differ this depends on the text's length, as :class:`DynamicNTKScaling` does.

    Args:
        short_factor: A divisor for each pair, for texts of at most L₀ tokens.
        long_factor: A divisor for each pair, for longer texts.
        original_seq_len: L₀, in tokens.
        factor: Longest text over L₀; it sets the :attr:`attention_factor`, √(1 + ln(factor)/ln(L₀)).
        softmax_factor: The :attr:`attention_factor` itself.
        seq_len: Length that every text counts as; None: that of each text.

    Source: Ding et al. 2024 (arXiv 2402.13753); the configuration of Phi-3 for the attention factor.
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_seq_len: int
    factor: float = 1.0
    softmax_factor: float | None = None
    seq_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            divisors = tuple(float(x) for x in getattr(self, name))
            if not divisors or not all(0 < x < math.inf for x in divisors):
                raise ValueError(f"{name} must hold positive numbers, got {list(divisors)}")
            object.__setattr__(self, name, divisors)  # tuples can be hashed
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"short_factor and long_factor must be of one length, got {len(self.short_factor)} and {len(self.long_factor)}"
            )
        _check_factor(self.factor)
        _check_lengths(self.original_seq_len, self.seq_len)
        if self.original_seq_len < 2:
            raise ValueError(f"original_seq_len must be at least 2, got {self.original_seq_len}")
        _check_softmax_factor(self.softmax_factor)

    @property
    def attention_factor(self) -> float:  # noqa: D102
        if self.softmax_factor is not None:
            return self.softmax_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_seq_len))

    @property
    def is_dynamic(self) -> bool:  # noqa: D102
        return self.seq_len is None and self.short_factor != self.long_factor

    def inv_freq(self, width: int, base: float, seq_len: Tensor) -> Tensor:  # noqa: D102
        if len(self.short_factor) != width // 2:
            raise ValueError(
                f"LongRoPE needs a factor for each of the {width // 2} pairs, got {len(self.short_factor)}"
            )
        short, long = seq_len.new_tensor(self.short_factor), seq_len.new_tensor(self.long_factor)
        length = seq_len if self.seq_len is None else seq_len.new_tensor(self.seq_len)
        is_long = (length > self.original_seq_len)[..., None]
        return inv_freq(width, base, device=seq_len.device) / torch.where(is_long, long, short)


def _ntk(width: int, base: float, factor: Tensor, name: str) -> Tensor:
    """``(base·factor^(w/(w - 2)))^(-2i/w)`` for each factor."""
    if width < 4:
        raise ValueError(f"{name} needs at least two pairs to turn, got a rotated width of {width}")
    exponent = -torch.arange(0, width, 2, dtype=torch.float64, device=factor.device) / width
    return (base * factor[..., None] ** (width / (width - 2))) ** exponent


def _check_factor(factor: float) -> None:
    if not 1 <= factor < math.inf:
        raise ValueError(f"factor must be at least 1, got {factor}")


def _check_lengths(original_seq_len: int, seq_len: int | None = None) -> None:
    for name, length in (("original_seq_len", original_seq_len), ("seq_len", seq_len)):
        if length is not None and not length >= 1:
            raise ValueError(f"{name} must be at least 1, got {length}")


def _check_softmax_factor(factor: float | None) -> None:
    if factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"softmax_factor must be positive, got {factor}")
