"""Causal attention alone: our backends, the machine's limit, and the peers that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linrope import Rotary, linear_attention
from tasks.speed.rows import Row, Timed, clock, interleaved, limit_operations, matmul_rate

CASES = ((2, 8, 1024, 64, 64), (2, 8, 1024, 256, 64), (1, 8, 4096, 64, 64), (1, 4, 32768, 64, 64))  # b, h, n, m, e
_SEEN_BY_LIMIT = "limit"
# Beyond, explicit n × s matrices and sums for every token need more memory or patience than they are worth.
_LONGEST = {"reference": 2048, "performer-pytorch": 4096, "SDPA (softmax)": 8192}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure(device: torch.device, quick: bool) -> Iterator[Row]:
    """Forward and backward of every case: numerator rotary for ours, no rotation for peers, which have none."""
    ours: dict[str, Attend] = {name: _ours(name) for name in ("native", "chunked", "reference")}
    if device.type != "cpu":
        del ours["native"]
    found, absent = peers(device)
    for sizes in CASES[:1] if quick else CASES:
        yield from _case(sizes, {**ours, **found}, device, 5 if quick else 9)
    yield from (Row("attention", "", name, note=note) for name, note in absent.items())


def _case(sizes: tuple[int, ...], contenders: dict[str, Attend], device: torch.device, rounds: int) -> Iterator[Row]:
    b, h, n, m, e = sizes
    case = f"b {b}, h {h}, n {n:,}, m {m}, e {e}"
    query, key = (torch.rand(b, h, n, m, device=device).requires_grad_() for _ in "qk")
    value = torch.randn(b, h, n, e, device=device).requires_grad_()
    grad = torch.randn(b, h, n, e, device=device)
    runs: dict[str, Timed] = {_SEEN_BY_LIMIT: matmul_rate(device)}
    for name, attend in contenders.items():
        if n <= _LONGEST.get(name, n):
            runs[name] = _forward_and_backward(partial(attend, query, key, value), (query, key, value), grad)
    times = interleaved(runs, rounds)
    rate = 2 * 2048**3 / times[_SEEN_BY_LIMIT][0]
    limit = limit_operations(*sizes) / rate
    ours = "native" if "native" in times else "chunked"
    yield Row("attention", case, _SEEN_BY_LIMIT, n=n, seconds=limit, note=f"{rate / 1e9:,.0f} GFLOP/s")
    for name in contenders:
        if name in times:
            total = sum(times[name])
            yield Row(
                "attention",
                case,
                name,
                n=n,
                forward=times[name][0],
                seconds=total,
                limit_share=limit / total,
                ratio=total / sum(times[ours]),
                against=ours,
                note=_NOTES.get(name, ""),
            )
        else:
            yield Row("attention", case, name, n=n, note=f"left out: longer than {_LONGEST[name]:,}")


def _forward_and_backward(call: Callable[[], Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> Timed:
    def run() -> tuple[float, float]:
        begin = clock(grad.device)
        output = call()
        middle = clock(grad.device)
        torch.autograd.grad(output, inputs, grad)
        return middle - begin, clock(grad.device) - middle

    return run


def _ours(backend: str) -> Attend:
    rotary = Rotary()
    return lambda query, key, value: linear_attention(query, key, value, rotary=rotary, backend=backend)  # type: ignore[arg-type]


_NOTES = {
    "performer-pytorch": "no rotation",
    "fast-transformers": "no rotation, no normalizer",
    "SDPA (softmax)": "no rotation, heads of m",
    "flash-linear-attention": "no rotation",
}


def peers(device: torch.device) -> tuple[dict[str, Attend], dict[str, str]]:
    """The peers that are installed here, and those that are not, with the reason."""
    found: dict[str, Attend] = {"SDPA (softmax)": partial(scaled_dot_product_attention, is_causal=True)}
    absent: dict[str, str] = {}
    places = {
        "performer-pytorch": ("performer_pytorch.performer_pytorch", "causal_linear_attention_noncuda"),
        "fast-transformers": ("fast_transformers.causal_product", "causal_dot_product"),
        "flash-linear-attention": ("fla.ops.linear_attn", "chunk_linear_attn"),
    }
    for name, (module, function) in places.items():
        try:
            attend = getattr(importlib.import_module(module), function)
        except (ImportError, OSError, AttributeError) as error:
            absent[name] = f"absent: {error}"
            continue
        if name != "flash-linear-attention":
            found[name] = attend
        elif device.type == "cuda":
            found[name] = partial(_flash, attend)
        else:
            absent[name] = "absent: it needs CUDA"
    return found, absent


def _flash(attend: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """flash-linear-attention takes b n h m."""
    turned = (x.transpose(1, 2) for x in (query, key, value))
    return attend(*turned, scale=1.0, normalize=True)[0].transpose(1, 2)
