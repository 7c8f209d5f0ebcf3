"""The weights by which a layer's output is a sum of values, explicitly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from linrope.attention import RMS_EPSILON
from linrope.attention.decay import decayed, forgets
from linrope.attention.inputs import Inputs, prepare
from linrope.attention.packing import packed_positions
from linrope.attention.reference import reference
from linrope.attention.state import State, empty_state
from linrope.diagnostics.measures import Weights
from linrope.layers import KernelAttention, SoftmaxAttention
from linrope.layers.heads import share_heads
from linrope.layers.softmax import softmax_weights
from linrope.rotary import LearnedRotary, Rotary, rotated_width


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
        if layer.rotary is not None and layer.rotary.is_dynamic:
            raise ValueError(f"packed sequences under {layer.rotary} have frequencies each; diagnose them one by one")
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
        for x in layer.map_heads(
            query, key, query_positions, key_positions, key_mask, scaled=layer.normalizer is not None
        )
    )
    assert mapped is not None
    assert mapped_key is not None

    log_decay = None if layer.decay is None else layer.decay(query.shape[1], query.device)

    def matrix(q: Tensor, k: Tensor, rotates: bool) -> Tensor:
        """(R q_t)·(R k_s) e^(c_s - m_t) where query t attends to key s: the reference's outputs for unit vectors."""
        units = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        rotary = layer.rotary if rotates and layer.rotary_placement == "numerator" else None
        inputs = prepare(q, k, units, rotary, key_mask, query_positions, key_positions, log_scale)
        rate = log_decay if rotates or layer.decay_placement == "both" else None
        decays = forgets(rate, rotary, q.shape[-1])
        state: State = empty_state(inputs.query, inputs.value, has_log_scale=decays or log_scale is not None)

        def path(inputs: Inputs, state: State) -> tuple[Tensor, State]:
            return reference(inputs, state, causal=causal, divides=False)

        if decays:
            output, _ = decayed(inputs, state, rate, layer.decay_placement, path, divides=False)
        else:
            output, _ = path(inputs, state)
        return output.masked_fill(~attended, 0.0)

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
    if layer.rotary is not None and rotated_width(query.shape[-1], layer.rotary.fraction) >= layer.rotary.multiple:
        rotary = layer.rotary
        if not isinstance(rotary, LearnedRotary):  # frequencies learned for the features of the map are no others'
            rotary = rotary.for_width(query.shape[-1])
        elif layer.rotary_placement == "numerator":
            rotary = Rotary(rotary.base, rotary.fraction, rotary.pairing).for_width(query.shape[-1])
        turned = rotary.before(query, key, query_positions, key_positions, key_mask)
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
    query, key, _ = layer.project(x, context, key_mask=key_mask)
    query, key = query.double(), key.double()
    if layer.rotary is not None:
        query, key = layer.rotary.before(query, key, positions, context_positions, key_mask)
    if layer.causal:
        query, key = query[:, :, :max_tokens], key[:, :, :max_tokens]
        key_mask, positions, context_positions = (
            None if x is None else x[..., :max_tokens] for x in (key_mask, positions, context_positions)
        )
    _check_length(max_tokens, query, key)
    attended = _attended(query, key, key_mask, layer.causal, None)
    weights = softmax_weights(query, key, attended, layer.logit_bias(query, key, positions, context_positions))
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
