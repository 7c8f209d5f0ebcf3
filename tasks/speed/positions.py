"""What each scheme of positions costs: a model of four layers, forward and backward, elu+1 and softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from linrope import (
    ALiBi,
    ByteTransformer,
    LearnedRotary,
    LinearAttention,
    NTKScaling,
    RetNetDecay,
    Rotary,
    SoftmaxAttention,
    T5Bias,
    XPos,
)
from tasks.speed.rows import Row, Timed, clock, interleaved

_LAYERS, _WIDTH, _HEADS = 4, 256, 4
_LINEAR = partial(LinearAttention, num_heads=_HEADS)
_SOFTMAX = partial(SoftmaxAttention, num_heads=_HEADS)

# Each first one is what the others are compared with.
SCHEMES: dict[str, dict[str, Callable[[int], nn.Module]]] = {
    "elu+1": {
        "none": _LINEAR,
        "numerator": partial(_LINEAR, rotary=Rotary()),
        "numerator, halves paired": partial(_LINEAR, rotary=Rotary(pairing="half")),
        "numerator, NTK": partial(_LINEAR, rotary=Rotary(scaling=NTKScaling(4.0))),
        "numerator, learned frequencies": partial(_LINEAR, rotary=LearnedRotary()),
        "before": partial(_LINEAR, rotary=Rotary(), rotary_placement="before"),
        "decay in both sums": partial(_LINEAR, decay=RetNetDecay()),
        "decay in the numerator": partial(_LINEAR, decay=RetNetDecay(), decay_placement="numerator"),
        "numerator and decay": partial(_LINEAR, rotary=Rotary(), decay=RetNetDecay()),
        "xPos": partial(_LINEAR, rotary=XPos()),
        "none, short convolutions": partial(_LINEAR, short_conv=4),
    },
    "softmax": {
        "none": _SOFTMAX,
        "rotary": partial(_SOFTMAX, rotary=Rotary()),
        "ALiBi": partial(_SOFTMAX, position_bias=ALiBi(_HEADS)),
        "T5 bias": partial(_SOFTMAX, position_bias=T5Bias(_HEADS)),
        "none, short convolutions": partial(_SOFTMAX, short_conv=4),
    },
}


def measure(device: torch.device, quick: bool) -> Iterator[Row]:
    """Seconds of a model with each, beside the same model without positions."""
    n = 256 if quick else 2048
    for kind, schemes in SCHEMES.items():
        times = interleaved({name: step(make, n, device) for name, make in schemes.items()}, 2 if quick else 7)
        for name in schemes:
            seconds = sum(times[name])
            yield Row(
                "positions",
                f"{kind}, 2 windows of {n:,}, {_LAYERS} layers, d {_WIDTH}, {_HEADS} heads",
                name,
                n=n,
                forward=times[name][0],
                seconds=seconds,
                ratio=seconds / sum(times["none"]),
                against="none",
            )


def step(make: Callable[[int], nn.Module], n: int, device: torch.device) -> Timed:
    """Forward and backward of a network with such attention."""
    torch.manual_seed(0)
    network = ByteTransformer(num_layers=_LAYERS, d_model=_WIDTH, attention=make).to(device)
    tokens = torch.randint(256, (2, n), device=device)

    def run() -> tuple[float, float]:
        begin = clock(device)
        logits = network(tokens)
        middle = clock(device)
        logits.square().mean().backward()
        return middle - begin, clock(device) - middle

    return run
