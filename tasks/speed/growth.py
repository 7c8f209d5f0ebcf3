"""One layer, longer and longer texts: elu+1 with numerator rotary, and softmax with rotary; forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from linrope import LinearAttention, Rotary, SoftmaxAttention
from tasks.speed.memory import peak_of
from tasks.speed.rows import Row, Timed, clock, interleaved, limit_operations, matmul_rate

_WIDTH, _HEADS = 256, 4
LINEAR, SOFTMAX = "linear", "softmax"


def measure(device: torch.device, quick: bool) -> Iterator[Row]:
    """Seconds and bytes of both layers, as far as softmax can follow, and the limit."""
    for power in range(8, 14 if quick else 18):
        n = 2**power
        kinds = (LINEAR, SOFTMAX) if n <= (2048 if quick else 32768) else (LINEAR,)
        runs: dict[str, Timed] = {"limit": matmul_rate(device)}
        runs |= {kind: step(kind, n, str(device)) for kind in kinds}
        times = interleaved(runs, 3 if quick else 7, patience=10.0)
        limit = (limit_operations(1, _HEADS, n, *(2 * [_WIDTH // _HEADS])) + 3 * 2 * 4 * n * _WIDTH**2) / (
            2 * 2048**3 / times["limit"][0]
        )
        yield Row("growth", f"n {n:,}", "limit", n=n, seconds=limit, note="with the four projections")
        for kind in kinds:
            seconds = sum(times[kind])
            memory = peak_of(step, kind, n, "cpu") if device.type == "cpu" else None
            yield Row(
                "growth",
                f"n {n:,}",
                kind,
                n=n,
                forward=times[kind][0],
                seconds=seconds,
                memory=memory,
                limit_share=limit / seconds,
                ratio=seconds / sum(times[LINEAR]),
                against=LINEAR,
            )


def step(kind: str, n: int, device: str) -> Timed:
    """Forward and backward of a layer on one text of n tokens; a first small call loads what libraries keep."""
    torch.manual_seed(0)
    make: Any = LinearAttention if kind == LINEAR else SoftmaxAttention
    layer = make(_WIDTH, _HEADS, rotary=Rotary()).to(device)
    x = torch.randn(1, n, _WIDTH, device=device)

    def run(x: torch.Tensor = x) -> tuple[float, float]:
        begin = clock(x.device)
        output = layer(x)
        middle = clock(x.device)
        output.backward(torch.ones_like(output))
        return middle - begin, clock(x.device) - middle

    run(x[:, :64])
    return run
