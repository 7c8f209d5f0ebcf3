"""How fast heads forget: a factor λ for every token of distance between a query and a key."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid


class Decay(nn.Module, ABC):
    """Gives each head its ln λ: the settings of a decay, which layers of a model can share."""

    @abstractmethod
    def forward(self, num_heads: int, device: torch.device | None = None) -> Float[Tensor, " h"]:
        """ln λ of each head, at most 0, float32 or wider.

        Raises:
            ValueError: This decay is for another number of heads.
        """

    def for_heads(self, num_heads: int) -> Decay:
        """Return this decay for a layer of so many heads, with parameters of its own where it learns.

        Raises:
            ValueError: As :meth:`forward`.
        """
        self(num_heads)
        return self


class ConstantDecay(Decay):
    """The same λ for every head, or one for each.

    Args:
        decay: λ, in (0, 1]; several: one for each head.

    Raises:
        ValueError: A ``decay`` outside (0, 1].
    """

    def __init__(self, decay: float | Sequence[float]) -> None:
        super().__init__()
        self.decay = tuple(map(float, decay)) if isinstance(decay, Sequence) else float(decay)
        of_heads = self.decay if isinstance(self.decay, tuple) else (self.decay,)
        if not of_heads or not all(0 < x <= 1 for x in of_heads):
            raise ValueError(f"decay must lie in (0, 1], got {decay}")

    def forward(self, num_heads: int, device: torch.device | None = None) -> Tensor:  # noqa: D102
        of_heads = self.decay if isinstance(self.decay, tuple) else (self.decay,) * num_heads
        if len(of_heads) != num_heads:
            raise ValueError(f"decay must be one number or {num_heads}, one for each head, got {len(of_heads)}")
        return _logarithms([math.log(x) for x in of_heads], device)

    def extra_repr(self) -> str:  # noqa: D102
        return f"decay={self.decay}"


class RetNetDecay(Decay):
    """λ = 1 - 2^(-5 - i) for head i = 0, 1, …: the first forgets in some 30 tokens, each next one in twice as many.

    Source: Sun et al. 2023 (arXiv 2307.08621), eq. 8.
    """

    def forward(self, num_heads: int, device: torch.device | None = None) -> Tensor:  # noqa: D102
        return _logarithms([math.log1p(-(2.0 ** (-5 - i))) for i in range(num_heads)], device)


class TransNormerDecay(Decay):
    """λ = exp(-(8i/h)·(1 - depth)) for head i = 1, …, h: with a rotation in the numerator, TransNormerLLM's LRPE-d.

    Args:
        depth: The layer's number over that of all layers, 0 ≤ ``depth`` < 1: lower layers forget faster.

    Raises:
        ValueError: ``depth`` is outside [0, 1).

    Source: Qin et al. 2023 (arXiv 2307.14995), section 3.1.
    """

    def __init__(self, depth: float = 0.0) -> None:
        super().__init__()
        if not 0 <= depth < 1:
            raise ValueError(f"depth must lie in [0, 1), got {depth}")
        self.depth = float(depth)

    def forward(self, num_heads: int, device: torch.device | None = None) -> Tensor:  # noqa: D102
        return _logarithms([-8 * (i + 1) / num_heads * (1 - self.depth) for i in range(num_heads)], device)

    def extra_repr(self) -> str:  # noqa: D102
        return f"depth={self.depth:g}"


class LearnedDecay(Decay):
    """λ = sigmoid(a), with a parameter a for each head of each layer; they begin as those of :class:`RetNetDecay`.

    Args:
        num_heads: h. None: settings alone, of which layers make their decay.

    Raises:
        ValueError: ``num_heads`` is below 1.
    """

    def __init__(self, num_heads: int | None = None) -> None:
        super().__init__()
        if num_heads is not None and num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {num_heads}")
        self.logit: nn.Parameter | None = None
        if num_heads is not None:
            first = RetNetDecay()(num_heads)  # ln λ; and the logit of λ is ln λ - ln(1 - λ)
            self.logit = nn.Parameter((first - torch.log(-torch.expm1(first))).float())

    def forward(self, num_heads: int, device: torch.device | None = None) -> Tensor:  # noqa: D102
        if self.logit is None:
            raise ValueError("LearnedDecay() has no parameters yet: pass num_heads, or give it to a layer")
        if len(self.logit) != num_heads:
            raise ValueError(f"this decay has been learned for {len(self.logit)} heads, got {num_heads}")
        return logsigmoid(self.logit.to(device, torch.promote_types(self.logit.dtype, torch.float32)))

    def for_heads(self, num_heads: int) -> LearnedDecay:  # noqa: D102
        if self.logit is None:
            return LearnedDecay(num_heads)
        self(num_heads)
        return self


def _logarithms(numbers: list[float], device: torch.device | None) -> Tensor:
    # Apple's GPUs have no float64.
    wide = torch.float32 if device is not None and device.type == "mps" else torch.float64
    return torch.tensor(numbers, dtype=wide, device=device)
