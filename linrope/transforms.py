"""Whether what runs is run by a transform, for which only plain tensor operations will do."""

from __future__ import annotations

import torch


def is_transformed() -> bool:
    """Whether a function is being exported, transformed by torch.func, or differentiated forwards."""
    if torch.compiler.is_exporting():
        return True
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
