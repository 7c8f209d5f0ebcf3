"""What attention layers do to real input."""

from __future__ import annotations

from typing import Any

from torch import nn

from linrope.diagnostics.measures import QUANTILES, Diagnostics, Weights
from linrope.diagnostics.weights import attention_weights

__all__ = ["QUANTILES", "Diagnostics", "Weights", "attention_weights", "diagnose"]


def diagnose(model: nn.Module, *inputs: Any, max_tokens: int = 256, **options: Any) -> dict[str, Diagnostics]:
    """Run ``model`` once, and say what each of its attention layers did.

    It runs in evaluation mode and without gradients, and is left as it was. Every :class:`linrope.KernelAttention`, also
    inside other layers and other people's models, and every :class:`linrope.SoftmaxAttention` is looked at. Queries of
    padding count as others do.

    Args:
        model: A layer or what holds some.
        inputs: Of one call of it.
        max_tokens: Causal layers are looked at for as many first tokens, and others must have no more: 8 h n² bytes a
            sequence for each of some ten matrices, and singular values in O(h n³).
        options: Of the call, by name.

    Returns:
        By the names of the modules; for a module that was called more than once, of the last call.

    Raises:
        ValueError: ``max_tokens`` below 1 or too few, no query with a key to attend to, or the model called none of
            these layers.
    """
    found = attention_weights(model, *inputs, max_tokens=max_tokens, **options)
    return {name: weights.measure() for name, weights in found.items()}
