"""What attention layers do to real input: their weights, explicitly, and what these say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrope.attention import RMS_EPSILON
from linrope.attention.inputs import prepare
from linrope.attention.packing import packed_positions
from linrope.attention.reference import reference
from linrope.attention.state import State, empty_state
from linrope.layers import KernelAttention, SoftmaxAttention
from linrope.layers.heads import project, share_heads
from linrope.layers.softmax import softmax_weights
from linrope.rotary import rotated_width

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class Diagnostics:
    """What one layer does, for each of its h heads: float64, averaged over sequences and queries unless said otherwise.

    The output of query t is Σ_s W_ts v_s. The weights W of linear attention rotated in the numerator may be negative and
    need not sum to 1; |W| normalized to sum 1 takes the place of probabilities where those are needed.

    Attributes:
        row_sums: Quantiles of Σ_s W_ts over all queries, at :data:`QUANTILES`; 1 without a rotation in the numerator.
        negative_share: Share of the attended pairs whose weight is below 0.
        growth: Largest Σ_s |W_ts| of any query: by how much the values may be magnified. 1 for averages.
        smallest_normalizer: Smallest Σ_s φ(q_t)·φ(k_s) / Σ_s ‖φ(q_t)‖‖φ(k_s)‖ of any query, at most 1: the nearer to 0, the
            more the division magnifies what rotation leaves, and its rounding. NaN where nothing is divided by it.
        entropy: -Σ_s p_ts ln p_ts in nats, of p = |W| normalized; ln n where all of n keys count alike.
        effective_rank: exp of the entropy of W's normalized singular values: between 1 and n.
        distance: Σ_s p_ts |t - s| in tokens, t and s the positions.
        softmax_error: ‖W - A‖ / ‖A‖, Frobenius norms, of A = softmax(q·k/√d) of the same queries and keys, rotated where
            the layer rotates and a pair of them turns; 0 for softmax itself, NaN where W is not normalized by features.

    Source: Roy and Vetterli 2007 for the effective rank.
    """

    row_sums: Float[Tensor, "h quantiles"]
    negative_share: Float[Tensor, " h"]
    growth: Float[Tensor, " h"]
    smallest_normalizer: Float[Tensor, " h"]
    entropy: Float[Tensor, " h"]
    effective_rank: Float[Tensor, " h"]
    distance: Float[Tensor, " h"]
    softmax_error: Float[Tensor, " h"]

    def means(self) -> dict[str, float]:
        """One number for each measure, over heads; for row sums the mean distance of their quantiles from 1."""
        numbers = {field.name: getattr(self, field.name).mean().item() for field in fields(self)}
        return numbers | {"row_sums": (self.row_sums - 1).abs().mean().item()}


@dataclass(frozen=True)
class Weights:
    """The explicit weights of one call of a layer, in float64.

    Attributes:
        weights: W, of key s for query t.
        attended: True where query t may attend to key s.
        apart: |t - s| in tokens.
        softmax: The weights of softmax, of the same queries and keys; None where W is not normalized by features.
        normalizer: Σ_s φ(q_t)·φ(k_s) / Σ_s ‖φ(q_t)‖‖φ(k_s)‖; None where nothing is divided by it.
        unrotated: W without the rotation in the numerator, divided by the same; None where there is no such rotation.
    """

    weights: Float[Tensor, "b h n s"]
    attended: Bool[Tensor, "b 1 n s"]
    apart: Float[Tensor, "#b 1 n s"]
    softmax: Float[Tensor, "b h n s"] | None
    normalizer: Float[Tensor, "b h n"] | None
    unrotated: Float[Tensor, "b h n s"] | None = None

    def measure(self) -> Diagnostics:
        """Reduce to numbers.

        Raises:
            ValueError: No query has a key to attend to.
        """
        w, (b, h, n, s) = self.weights, self.weights.shape
        valid = self.attended.any(-1)  # queries with something to attend to, b 1 n
        if not valid.any():
            raise ValueError(f"no query has a key to attend to: {n} queries, {s} keys, of which none takes part")
        size, least = w.abs(), torch.finfo(w.dtype).tiny
        p = size / size.sum(-1, keepdim=True).clamp_min(least)
        pairs = self.attended.expand(b, h, n, s)
        finite = w.isfinite().all(-1).all(-1)
        values = torch.linalg.svdvals(w.nan_to_num())
        spectrum = values / values.sum(-1, keepdim=True).clamp_min(least)
        rank = (-torch.xlogy(spectrum, spectrum).sum(-1)).exp().masked_fill(~finite, torch.nan)
        nan = w.new_full((h,), torch.nan)

        def mean(of_queries: Tensor) -> Tensor:
            return (of_queries * valid).sum((0, 2)) / valid.sum()

        return Diagnostics(
            row_sums=torch.quantile(w.sum(-1).transpose(0, 1)[:, valid[:, 0]], w.new_tensor(QUANTILES), dim=-1).mT,
            negative_share=((w < 0) & pairs).sum((0, 2, 3)) / pairs.sum((0, 2, 3)),
            growth=size.sum(-1).amax((0, 2)),
            smallest_normalizer=nan
            if self.normalizer is None
            else self.normalizer.masked_fill(~valid, torch.inf).amin((0, 2)),
            entropy=mean(-torch.xlogy(p, p).sum(-1)),
            effective_rank=rank.mean(0),
            distance=mean((p * self.apart).sum(-1)),
            softmax_error=nan
            if self.softmax is None
            else ((w - self.softmax).norm(dim=(-2, -1)) / self.softmax.norm(dim=(-2, -1))).mean(0),
        )


def diagnose(model: nn.Module, *inputs: Any, max_tokens: int = 256, **options: Any) -> dict[str, Diagnostics]:
    """Run ``model`` once, and say what each of its attention layers did.

    It runs in evaluation mode and without gradients, and is left as it was. Queries of padding count as others do. Every :class:`linrope.KernelAttention`, also
    inside other layers and other people's models, and every :class:`linrope.SoftmaxAttention` is looked at.

    Args:
        model: A layer or what holds some.
        inputs: Of one call of it.
        max_tokens: Causal layers are looked at for as many first tokens, and others must have no more: 8 h n² bytes a
            sequence for each of some ten matrices, and singular values in O(h n³).
        options: Of the call, by name.

    Returns:
        By the names of the modules; for a module that was called more than once, of the last call.

    Raises:
        ValueError: ``max_tokens`` below 1 or too few, no query with a key to attend to, or the model called none of
            these layers.
    """
    found = attention_weights(model, *inputs, max_tokens=max_tokens, **options)
    return {name: weights.measure() for name, weights in found.items()}


def attention_weights(model: nn.Module, *inputs: Any, max_tokens: int = 256, **options: Any) -> dict[str, Weights]:
    """Explicit weights of the layers that one call of ``model`` goes through, by name; arguments as in :func:`diagnose`."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    found: dict[str, Weights] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, (KernelAttention, SoftmaxAttention)):

            def look(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
                # Here, where parameters that are sharded elsewhere are whole.
                of: Any = _kernel_weights if isinstance(module, KernelAttention) else _softmax_weights
                found[name] = of(module, max_tokens, *args, **kwargs)

            hooks.append(module.register_forward_pre_hook(look, with_kwargs=True))
    try:
        with torch.no_grad(), torch.random.fork_rng(), _evaluating(model):
            model(*inputs, **options)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise ValueError(f"{type(model).__name__} called no attention layer of linrope")
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each module's own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _kernel_weights(
    layer: KernelAttention,
    max_tokens: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    causal: bool | None = None,
    offsets: Tensor | None = None,
) -> Weights:
    causal = layer.causal if causal is None else causal
    if offsets is not None:
        query_positions = packed_positions(offsets) if query_positions is None else query_positions
        key_positions = query_positions if key_positions is None else key_positions
    if causal:  # what comes later changes nothing
        key_positions = query_positions if key_positions is None else key_positions
        query, key, value = (x[:, :, :max_tokens] for x in (query, key, value))
        query_positions, key_positions, key_mask = (
            None if x is None else x[..., :max_tokens] for x in (query_positions, key_positions, key_mask)
        )
    _check_length(max_tokens, query, key)
    query, key, value = (
        x.double() for x in (query, share_heads(key, query.shape[1]), share_heads(value, query.shape[1]))
    )
    attended = _attended(query, key, key_mask, causal, offsets)
    mapped, mapped_key, log_scale = (
        None if x is None else x.double()
        for x in layer.map_heads(query, key, query_positions, key_positions, scaled=layer.normalizer is not None)
    )
    assert mapped is not None
    assert mapped_key is not None

    def matrix(q: Tensor, k: Tensor, rotates: bool) -> Tensor:
        """(R q_t)·(R k_s) e^(c_s - m_t) where query t attends to key s: the reference's outputs for unit vectors."""
        units = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        rotary = layer.rotary if rotates and layer.rotary_placement == "numerator" else None
        inputs = prepare(q, k, units, rotary, key_mask, query_positions, key_positions, log_scale)
        state: State = empty_state(inputs.query, inputs.value, has_log_scale=log_scale is not None)
        return reference(inputs, state, causal=causal, divides=False)[0].masked_fill(~attended, 0.0)

    numerator, kernel = matrix(mapped, mapped_key, True), matrix(mapped, mapped_key, False)
    sizes = matrix(mapped.norm(dim=-1, keepdim=True), mapped_key.norm(dim=-1, keepdim=True), False)
    normalizer = kernel.sum(-1)
    if layer.normalizer == "features":
        divisor = normalizer
    elif layer.normalizer == "rms":
        present = value if key_mask is None else value.masked_fill(~key_mask[:, None, :, None], 0.0)
        epsilon = RMS_EPSILON if log_scale is None else 0.0
        divisor = ((numerator @ present).square().mean(-1) + epsilon).sqrt()
    else:
        divisor = torch.ones_like(normalizer)
    turned = (query, key)
    if layer.rotary is not None and rotated_width(query.shape[-1], layer.rotary.fraction) > 1:
        rotary = layer.rotary.for_width(query.shape[-1])
        turned = rotary(query, query_positions), rotary(key, key_positions)
    return Weights(
        weights=_ratio(numerator, divisor[..., None]),
        attended=attended,
        apart=_apart(query, key, query_positions, key_positions),
        softmax=softmax_weights(*turned, attended) if layer.normalizer == "features" else None,
        normalizer=_ratio(normalizer, sizes.sum(-1)) if layer.normalizer == "features" else None,
        unrotated=_ratio(kernel, divisor[..., None])
        if layer.rotary is not None and layer.rotary_placement == "numerator"
        else None,
    )


def _softmax_weights(
    layer: SoftmaxAttention,
    max_tokens: int,
    x: Tensor,
    context: Tensor | None = None,
    *,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    context_positions: Tensor | None = None,
) -> Weights:
    if context is None:
        context_positions = positions
    query, key, _ = project((layer.query, layer.key, layer.value), layer.head_dim, x, context)
    query, key = query.double(), key.double()
    if layer.rotary is not None:
        query, key = layer.rotary(query, positions), layer.rotary(key, context_positions)
    if layer.causal:
        query, key = query[:, :, :max_tokens], key[:, :, :max_tokens]
        key_mask, positions, context_positions = (
            None if x is None else x[..., :max_tokens] for x in (key_mask, positions, context_positions)
        )
    _check_length(max_tokens, query, key)
    attended = _attended(query, key, key_mask, layer.causal, None)
    weights = softmax_weights(query, key, attended)
    return Weights(weights, attended, _apart(query, key, positions, context_positions), weights, None)


def _attended(query: Tensor, key: Tensor, key_mask: Tensor | None, causal: bool, offsets: Tensor | None) -> Tensor:
    """Which keys each query attends to, b 1 n s."""
    b, n, s = query.shape[0], query.shape[2], key.shape[2]
    allowed = torch.ones(b, 1, n, s, dtype=torch.bool, device=query.device)
    if causal:
        allowed = allowed.tril()
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None, :]
    if offsets is not None:
        number = torch.bucketize(torch.arange(max(n, s), device=query.device), offsets[1:].to(query.device), right=True)
        allowed = allowed & (number[:n, None] == number[:s])
    return allowed


def _apart(query: Tensor, key: Tensor, query_positions: Tensor | None, key_positions: Tensor | None) -> Tensor:
    """Distance of each query from each key in tokens, by their positions; b 1 n s, or 1 1 n s."""
    at, of = (
        (torch.arange(x.shape[2], device=x.device) if positions is None else positions).to(query.dtype)
        for x, positions in ((query, query_positions), (key, key_positions))
    )
    distance = (at[..., :, None] - of[..., None, :]).abs()
    return distance[:, None] if distance.ndim == 3 else distance[None, None]


def _check_length(max_tokens: int, query: Tensor, key: Tensor) -> None:
    if not query.shape[2] or not key.shape[2]:
        raise ValueError(f"no query has a key to attend to: {query.shape[2]} queries, {key.shape[2]} keys")
    if max(query.shape[2], key.shape[2]) > max_tokens:
        raise ValueError(
            f"attention that is not causal is looked at whole: max_tokens must be at least "
            f"{max(query.shape[2], key.shape[2])}, got {max_tokens}"
        )


def _ratio(numerator: Tensor, divisor: Tensor) -> Tensor:
    """numerator / divisor, 0 where the divisor is."""
    nothing = divisor == 0
    return (numerator / divisor.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)
