"""Muon for the matrices inside a network, AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def split_parameters(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Parameters as hidden matrices, the last matrix (it reads out bytes), and all others: embeddings, gains, biases."""
    embeddings = {id(p) for m in network.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices, others = [], []
    for parameter in network.parameters():
        (matrices if parameter.ndim == 2 and id(parameter) not in embeddings else others).append(parameter)
    return matrices[:-1], matrices[-1:], others


class MuonAdamW(torch.optim.Optimizer):
    """Two optimizers that step, save and follow a schedule as one.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate and one weight decay
    serve both.

    Args:
        hidden: Matrices for Muon.
        others: Parameter groups for AdamW.
        lr: Learning rate of both.
        weight_decay: Muon's; AdamW's groups bring their own.
        betas: AdamW's.

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (arXiv 2502.16982), section 2.2, for the scale.
    """

    def __init__(
        self,
        hidden: Iterable[nn.Parameter],
        others: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        self.parts = {
            "muon": torch.optim.Muon(hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            "adamw": torch.optim.AdamW(others, lr=lr, betas=betas),
        }
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {"lr": lr})
        # The very same groups, so that what a schedule writes here is what the parts read.
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Both states, by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]
