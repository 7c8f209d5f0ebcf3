"""The rotation that a model of Hugging Face makes by itself, as one of ours."""

from __future__ import annotations

from typing import Any

from linrope.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    Rotary,
    Scaling,
    YaRN,
)


def rotation_of(config: Any) -> Rotary:
    """The rotation of a Llama with this ``config``, scaled as it is.

    What a scaling multiplies queries and keys by (YaRN, LongRoPE) is the softmax's, and left out in the numerator.

    Raises:
        ValueError: It is scaled in a way that has no counterpart here.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return Rotary(rope.get("rope_theta", 10_000.0), pairing="half", scaling=_scaling(rope, config))


def _scaling(rope: dict[str, Any], config: Any) -> Scaling | None:
    kind: str = rope.get("rope_type", "default")
    factor: Any = rope.get("factor")
    longest = config.max_position_embeddings
    trained = rope.get("original_max_position_embeddings", longest)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "dynamic":
        return DynamicNTKScaling(longest, factor)
    if kind == "llama3":
        return Llama3Scaling(factor, trained, rope["low_freq_factor"], rope["high_freq_factor"])
    if kind == "yarn" and rope.get("truncate", True):
        fast, slow = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
        return YaRN(factor or longest / trained, trained, fast, slow)
    if kind == "longrope":
        return LongRoPE(rope["short_factor"], rope["long_factor"], trained, factor or longest / trained)
    raise ValueError(f"this model's rotation is scaled ({kind}): pass the rotary that is to replace it")
