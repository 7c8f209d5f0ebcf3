"""Continue a text with a trained network, byte by byte as it comes: ``python -m tasks.generate --ckpt RUN_DIR/checkpoints/last.ckpt``."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plots.checkpoints import load_network
from plots.runs import RunError


def generate(
    network: nn.Module, prompt: bytes, num_bytes: int, *, seed: int, device: str, **sampling: float | None
) -> Iterator[bytes]:
    """Give the bytes that follow ``prompt``, one at a time; memory does not grow if the attention's state does not.

    Args:
        network: With ``continuation``, as :class:`linrope.ByteTransformer` has.
        prompt: What they follow, at least one byte.
        num_bytes: How many.
        seed: Of the draws.
        device: Where the network computes.
        sampling: ``temperature``, ``top_k`` and ``top_p`` of :meth:`linrope.ByteTransformer.generate`.

    Raises:
        RunError: The network has no ``continuation``.
        ValueError: As :meth:`linrope.ByteTransformer.generate`.
    """
    if not hasattr(network, "continuation"):
        raise RunError(f"{type(network).__name__} cannot carry a state from byte to byte: it has no continuation()")
    tokens = torch.tensor([list(prompt)], dtype=torch.long, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    following = network.to(device).continuation(tokens, generator=generator, **sampling)  # type: ignore[operator]
    return (bytes(token.tolist()) for token in itertools.islice(following, num_bytes))


def compile_stream(network: nn.Module) -> None:
    """Let torch compile what carries a state from byte to byte; the prompt, of any length, goes through as it is."""
    first: Any = network.stream
    further = torch.compile(first)
    network.stream = lambda tokens, states=None: (first if states is None else further)(tokens, states)  # type: ignore[assignment]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tasks.generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--ckpt", type=Path, required=True, help="checkpoint of a run")
    parser.add_argument("--prompt", default="\n", help="text to continue (default: a new line)")
    parser.add_argument("--num_bytes", type=int, default=1000, help="bytes to add (default: 1000)")
    parser.add_argument("--temperature", type=float, default=1.0, help="divides the logits; 0 takes the likeliest byte")
    parser.add_argument("--top_k", type=int, help="draw from the k likeliest bytes alone")
    parser.add_argument("--top_p", type=float, help="draw from the likeliest bytes that together have this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
    parser.add_argument(
        "--compile", action="store_true", help="compile first, for some seconds; then several times as fast"
    )
    options = parser.parse_args(arguments)
    # As they were typed: what is no UTF-8 is kept by Python in its own way, and given back so.
    prompt = options.prompt.encode(errors="surrogateescape")
    sampling = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    try:
        if options.num_bytes < 0:
            raise RunError(f"--num_bytes must not be negative, got {options.num_bytes}")
        network = load_network(options.ckpt)
        if options.compile:
            compile_stream(network)
        pieces = generate(network, prompt, options.num_bytes, seed=options.seed, device=options.device, **sampling)
        sys.stdout.buffer.write(prompt)
        begin = time.perf_counter()
        for piece in pieces:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    except (RunError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    rate = options.num_bytes / max(time.perf_counter() - begin, 1e-9)
    print(f"\n{options.num_bytes:,} bytes, {rate:,.0f} a second", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
