"""A whole training step: our model with numerator rotary, performer-pytorch's of the same sizes, and softmax."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from linrope import ByteTransformer, FavorPlus, LinearAttention, Rotary, SoftmaxAttention
from tasks.language_modeling import mean_loss
from tasks.speed.memory import peak_of
from tasks.speed.rows import Row, Timed, clock, interleaved

_LAYERS, _WIDTH, _HEADS = 4, 256, 4
OURS, SOFTMAX, PERFORMER = "linrope, FAVOR+", "linrope, softmax", "PerformerLM"


def measure(device: torch.device, quick: bool) -> Iterator[Row]:
    """Tokens a second and peak memory of forward, backward and optimizer."""
    n, m = (256, 64) if quick else (1024, 256)
    case = f"1 window of {n:,}, {_LAYERS} layers, d {_WIDTH}, {_HEADS} heads, {m} features"
    names = [OURS, SOFTMAX, PERFORMER]
    runs: dict[str, Timed] = {}
    for name in names:
        try:
            runs[name] = _timed(step(name, n, m, str(device)), device)
        except ImportError as error:
            yield Row("training", case, name, n=n, note=f"absent: {error}")
    times = interleaved(runs, 3 if quick else 5)
    slowest = sum(times[PERFORMER]) if PERFORMER in times else None
    for name in runs:
        seconds = sum(times[name])
        memory = None
        if device.type == "cpu":
            memory = peak_of(step, name, n, m, "cpu")
        yield Row(
            "training",
            case,
            name,
            n=n,
            seconds=seconds,
            tokens_per_second=n / seconds,
            memory=memory,
            ratio=None if slowest is None else slowest / seconds,
            against=PERFORMER,
        )


def step(name: str, n: int, m: int, device: str) -> Callable[[], Any]:
    """Return a training step of the network of that name, AdamW included."""
    torch.manual_seed(0)
    network = _network(name, n, m).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    tokens = torch.randint(256, (1, n + 1), device=device)

    def run() -> None:
        loss = mean_loss(network(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return run


def _network(name: str, n: int, m: int) -> nn.Module:
    if name == PERFORMER:
        from performer_pytorch import PerformerLM

        sizes: Any = {"dim": _WIDTH, "depth": _LAYERS, "heads": _HEADS, "dim_head": _WIDTH // _HEADS}
        with contextlib.redirect_stdout(None):  # it says that it lacks its CUDA kernel, once a layer
            return PerformerLM(num_tokens=256, max_seq_len=n, causal=True, nb_features=m, **sizes)
    if name == SOFTMAX:
        attention: Any = partial(SoftmaxAttention, num_heads=_HEADS, rotary=Rotary())
    else:
        favor = partial(FavorPlus, num_features=m, scaled_dtype="float32")
        attention = partial(LinearAttention, num_heads=_HEADS, feature_map=favor, rotary=Rotary())
    return ByteTransformer(num_layers=_LAYERS, d_model=_WIDTH, attention=attention)


def _timed(run: Callable[[], Any], device: torch.device) -> Timed:
    def timed() -> tuple[float, float]:
        begin = clock(device)
        run()
        return clock(device) - begin, 0.0

    return timed
