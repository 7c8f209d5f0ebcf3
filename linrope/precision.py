"""Precision that sums and exponents need, whatever the inputs and whatever autocast is on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32 or wider: a bfloat16 sum of ones stops at 256."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off, where the device knows it at all."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
