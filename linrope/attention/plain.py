"""Causal linear attention in chunks as plain tensor operations: what torch.func transforms and exporters take.

No loop runs over the chunks, so a length may stay unknown, and nothing is written over, so that autograd may go
through it in any mode and as often as it likes. It keeps more for a backward pass than :mod:`linrope.attention.chunked`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from linrope.attention.inputs import Inputs
from linrope.attention.state import NO_KEY, State, divide


def plain(inputs: Inputs, state: State, chunk_size: int, *, divides: bool) -> tuple[Tensor, State]:
    """Outputs, and the state after the last token, by the equations of :func:`linrope.attention.chunked.chunked`."""
    n = inputs.query.shape[2]
    c = chunk_size if isinstance(n, torch.SymInt) else min(chunk_size, n)
    q, k, rq, rk, v = (_in_chunks(x, c) for x in (inputs.query, inputs.key, *inputs.rotated(), inputs.value))
    future = _later(q.new_empty(c))
    if inputs.log_scale is None:
        ends, inside, carried, closing = None, 1.0, 1.0, 1.0
    else:
        scale = _in_chunks(inputs.log_scale[..., None], c, NO_KEY)[..., 0]
        of_chunks = torch.cat((state.log_scale[..., None], scale.amax(-1)), dim=-1).detach()
        ends = _maxima_so_far(of_chunks)
        top = torch.maximum(_maxima_so_far(scale.detach()), ends[..., :-1, None])
        inside = (scale[..., None, :] - top[..., None]).masked_fill(future, -torch.inf).to(q.dtype).exp()
        carried = (ends[..., :-1, None] - top).to(q.dtype).exp()[..., None]
        closing = (scale - ends[..., 1:, None]).to(q.dtype).exp()[..., None]

    kv = _sums_so_far(state.kv, (rk * closing).mT @ v, ends)
    key_sum = _sums_so_far(state.key_sum[..., None], (k * closing).sum(-2)[..., None], ends)
    # Filled as well as weighed by 0: what a later key holds may be infinite.
    rotated_scores, scores = ((x @ y.mT).masked_fill(future, 0.0) * inside for x, y in ((rq, rk), (q, k)))
    numerator = rotated_scores @ v + carried * (rq @ kv[:, :, :-1])
    normalizer = scores.sum(-1, keepdim=True) + carried * (q @ key_sum[:, :, :-1])
    tokens = torch.arange(n, device=q.device)  # without those that fill the last chunk
    numerator, normalizer = (x.flatten(2, 3).index_select(2, tokens) for x in (numerator, normalizer))
    last_scale = state.log_scale if ends is None else ends[..., -1]
    last = State(kv[:, :, -1], key_sum[:, :, -1, :, 0], state.position, last_scale)
    return divide(numerator, normalizer[..., 0]) if divides else numerator, last


def _in_chunks(x: Float[Tensor, "b h n x"], c: int, fill: float = 0.0) -> Float[Tensor, "b h g c x"]:
    """Tokens dealt out to chunks; ``fill`` is the rest of the last one."""
    n = x.shape[2]
    # Of an unknown length, a chunk more than there may be: an exporter takes an axis for 1 long, or for longer, for good.
    g = n // c + 2 if isinstance(n, torch.SymInt) else -(-n // c)
    return pad(x, (0, 0, 0, g * c - n), value=fill).unfold(2, c, c).mT


def _later(x: Float[Tensor, "*axes g"]) -> Bool[Tensor, "g g"]:
    """True in row i for what comes after number i along the last axis."""
    g = x.shape[-1]
    return torch.ones(g, g, dtype=torch.bool, device=x.device).triu(1)


def _maxima_so_far(x: Float[Tensor, "*axes g"]) -> Float[Tensor, "*axes g"]:
    """Largest of the first i along the last axis. ONNX has no cummax."""
    return x[..., None, :].masked_fill(_later(x), -torch.inf).amax(-1)


def _sums_so_far(
    first: Float[Tensor, "b h m e"], parts: Float[Tensor, "b h g m e"], ends: Float[Tensor, "b h g+1"] | None
) -> Float[Tensor, "b h g+1 m e"]:
    """Sums of ``first`` and the chunks before each, then of all; rescaled where the maxima at their ``ends`` grow."""
    parts = torch.cat((first[:, :, None], parts), dim=2)
    if ends is None:
        return parts.cumsum(2)
    # Quadratic in the number of chunks, of which there are few.
    weights = (ends[..., None, :] - ends[..., None]).masked_fill(_later(ends), -torch.inf).to(parts.dtype).exp()
    return torch.einsum("bhij,bhjme->bhime", weights, parts)
