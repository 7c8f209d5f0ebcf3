"""What is measured of each network, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linrope.rotary import Scaling
from plots.runs import RunError

METHOD = {
    "windows": "non-overlapping windows, each from nothing; every target of the split scored once, float64 sums",
    "stream": (
        "the state carried from piece to piece of the trained length through the whole split, positions growing; "
        "scalings are given the largest factor; not for softmax attention, whose state is every key"
    ),
    "factor": (
        "of a scaling: the window over the trained length, whatever the network was fine-tuned with; "
        "DynamicNTKScaling grows with the text by itself"
    ),
    "position": "place of a prediction's last input in its window, from 0; position_to is excluded",
    "finetune": (
        "the run's optimizer settings and seed, warm-up and decay within these steps, moments from nothing, batches "
        "counted on from the run's last step, bytes a step as in the run"
    ),
}
"""What length.json says of the figures."""


@dataclass(frozen=True)
class Plan:
    """What is measured of each network.

    Attributes:
        split: "validation" or "test".
        max_bytes: Bytes of it, from its beginning; None: all.
        factors: Lengths of windows over the trained one, ascending.
        scalings: Of the rotation; without one is measured always.
        finetune_steps: Optimizer steps after which all is measured once more; 0: it is not.
        finetune_factor: Length of the windows of these steps over the trained one; of no meaning without steps, as their rate.
        finetune_learning_rate: Their peak rate; None: a tenth of the run's.

    Raises:
        RunError: A number out of range.
    """

    split: str
    max_bytes: int | None
    factors: tuple[float, ...]
    scalings: tuple[type[Scaling], ...]
    finetune_steps: int
    finetune_factor: float
    finetune_learning_rate: float | None

    def __post_init__(self) -> None:
        if not self.factors:
            raise RunError("--factors needs at least one length, as a multiple of the trained one")
        for name, factors in (("factors", self.factors), ("finetune_factor", self._finetune_factors)):
            if factors and min(factors) < 1:
                raise RunError(f"--{name} must be at least 1, the trained length, got {min(factors):g}")
        if self.max_bytes is not None and self.max_bytes < 2:
            raise RunError(f"--max_bytes must be at least 2, one to see and one to predict, got {self.max_bytes}")
        if self.finetune_steps < 0:
            raise RunError(f"--finetune_steps must not be negative, got {self.finetune_steps}")
        if self.finetune_steps and self.finetune_learning_rate is not None and not self.finetune_learning_rate > 0:
            raise RunError(f"--finetune_learning_rate must be positive, got {self.finetune_learning_rate:g}")

    @property
    def _finetune_factors(self) -> tuple[float, ...]:
        return (self.finetune_factor,) if self.finetune_steps else ()

    def windows(self, trained: int) -> dict[float, int]:
        """Bytes of the windows, by factor.

        Raises:
            RunError: One is no whole number.
        """
        for factor in (*self.factors, *self._finetune_factors):
            if factor * trained % 1:
                raise RunError(f"{factor:g} times the trained length of {trained} is no whole number of bytes")
        return {factor: int(factor * trained) for factor in self.factors}

    def check(self, trained: int, split_size: int) -> None:
        """Refuse a split that does not fill the longest window.

        Raises:
            RunError: It does not, or a window is no whole number of bytes.
        """
        longest = max(self.windows(trained).values())
        if split_size <= longest:
            raise RunError(
                f"the {self.split} split has {split_size:,} bytes here, too few for a window of {longest:,} inputs and "
                f"one more target: give smaller --factors, a larger file{' or --max_bytes' if self.max_bytes else ''}"
            )

    def settings(self) -> dict[str, Any]:
        """All of it that matters, as plain values."""
        paths = [f"{kind.__module__}.{kind.__qualname__}" for kind in self.scalings]
        unused = {} if self.finetune_steps else {"finetune_factor": None, "finetune_learning_rate": None}
        return {**vars(self), "factors": list(self.factors), "scalings": paths, **unused}
