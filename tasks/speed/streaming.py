"""One token more, at different places of a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from linrope import LinearAttention, Rotary, SoftmaxAttention
from linrope.attention.state import State
from linrope.layers.softmax import KeyValueState
from tasks.speed.rows import Row, Timed, clock, interleaved

_WIDTH, _HEADS = 256, 4
POSITIONS = (10, 1_000, 100_000)
_CALLS = 50  # of which one timing is made: a single one is too short


def measure(device: torch.device, quick: bool) -> Iterator[Row]:
    """Seconds a token and bytes of state of one layer: elu+1 with numerator rotary, and softmax with cached keys."""
    runs: dict[str, Timed] = {}
    sizes: dict[str, int] = {}
    for kind in ("linear", "softmax"):
        for position in POSITIONS:
            layer, state = _layer_at(kind, position, device)
            runs[f"{kind}|{position}"] = _steps(layer, state, device)
            sizes[f"{kind}|{position}"] = sum(x.numel() * x.element_size() for x in state)
    times = interleaved(runs, 5 if quick else 21, patience=15.0)
    for name, seconds in times.items():
        kind, position = name.split("|")
        first = sum(times[f"{kind}|{POSITIONS[0]}"])
        yield Row(
            "streaming",
            f"token at position {int(position):,}",
            kind,
            n=int(position),
            seconds=sum(seconds),
            memory=sizes[name],
            ratio=sum(seconds) / first,
            against=f"position {POSITIONS[0]}",
        )


def _layer_at(kind: str, position: int, device: torch.device) -> tuple[Any, Any]:
    """A layer, and the state that it has at ``position``: made up, for softmax would take hours to get there."""
    torch.manual_seed(0)
    head_dim = _WIDTH // _HEADS
    here = torch.tensor([position], device=device)
    if kind.startswith("softmax"):
        keys, values = (torch.randn(1, _HEADS, position, head_dim, device=device) for _ in "kv")
        valid = torch.ones(1, position, dtype=torch.bool, device=device)
        return SoftmaxAttention(_WIDTH, _HEADS, rotary=Rotary()).to(device), KeyValueState(keys, values, valid, here)
    kv = torch.randn(1, _HEADS, head_dim, head_dim, device=device)
    key_sum = position * torch.rand(1, _HEADS, head_dim, device=device)
    state = State(kv, key_sum, here, torch.zeros(1, _HEADS, device=device))
    return LinearAttention(_WIDTH, _HEADS, rotary=Rotary()).to(device), state


def _steps(layer: Any, state: Any, device: torch.device) -> Timed:
    token = torch.randn(1, 1, _WIDTH, device=device)

    @torch.inference_mode()
    def run() -> tuple[float, float]:
        begin = clock(device)
        for _ in range(_CALLS):
            layer.stream(token, state)
        return (clock(device) - begin) / _CALLS, 0.0

    return run
