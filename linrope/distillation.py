"""Fit a learned feature map to the attention of a softmax layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from linrope.layers import LinearAttention, SoftmaxAttention
from linrope.layers.softmax import softmax_weights


def kernel_cross_entropy(
    query_features: Float[Tensor, "b h n m"],
    key_features: Float[Tensor, "b h s m"],
    target: Float[Tensor, "b h n s"],
    *,
    key_log_scale: Float[Tensor, "b h s"] | None = None,
) -> Float[Tensor, ""]:
    """Mean over queries of -Σ_s p_ts ln w_ts, in nats, with p the ``target`` and w = φ(q)·φ(k) / Σ_s φ(q)·φ(k).

    Both sums run over the keys whose target is above 0. It is least, the entropy of p, where the two agree.

    Args:
        query_features: φ(q), of a map whose kernel is positive.
        key_features: φ(k).
        target: Attention weights, which sum to 1 for each query.
        key_log_scale: See :func:`linrope.linear_attention`.

    Source: Zhang et al. 2024 (arXiv 2402.04347), section 4.2.
    """
    kernel = query_features @ key_features.mT
    # The least positive number where a product vanished: its logarithm stays finite, its gradient is 0.
    log_kernel = kernel.clamp_min(torch.finfo(kernel.dtype).tiny).log()
    if key_log_scale is not None:
        log_kernel = log_kernel + key_log_scale[:, :, None]
    absent = target == 0
    log_weight = log_kernel.masked_fill(absent, -torch.inf).log_softmax(-1)
    return -(target * log_weight.masked_fill(absent, 0.0)).sum(-1).mean()  # 0 · -inf is not 0


def fit_to_softmax(
    student: LinearAttention,
    teacher: SoftmaxAttention,
    inputs: Iterable[Float[Tensor, "b n d_model"]],
    *,
    learning_rate: float = 1e-2,
) -> list[float]:
    """Give ``student`` the projections of ``teacher``, then train its feature map to attend alike.

    One AdamW step on :func:`kernel_cross_entropy` for each of ``inputs``; only the map is trained, and a rotation in the
    numerator, which comes after it, is not part of what is fitted. Memory is quadratic in n.

    Args:
        student: Layer whose feature map has parameters and a positive kernel.
        teacher: Layer with the same sizes.
        inputs: What the layers read.
        learning_rate: Of AdamW.

    Returns:
        The loss of each step, before it, in nats.

    Raises:
        ValueError: A map without parameters or a positive kernel, layers of different sizes, or one causal and one not.
    """
    feature_map = student.feature_map
    if not list(feature_map.parameters()):
        raise ValueError(f"{type(feature_map).__name__} has no parameters to fit")
    if not feature_map.kernel_is_positive:
        raise ValueError(
            f"the kernel of {type(feature_map).__name__} can be 0 or negative, so it has no logarithm to fit"
        )
    sizes = [(layer.query.in_features, layer.num_heads, layer.causal, layer.short_conv) for layer in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"(d_model, num_heads, causal, short_conv) must agree, got {sizes[0]} and {sizes[1]}")
    convs = () if student.short_conv is None else ("query_conv", "key_conv", "value_conv")
    for name in ("query", "key", "value", "out", *convs):
        getattr(student, name).load_state_dict(getattr(teacher, name).state_dict())
    optimizer = torch.optim.AdamW(feature_map.parameters(), lr=learning_rate, weight_decay=0.0)
    losses = []
    for x in inputs:
        positions = torch.arange(x.shape[1], device=x.device)
        with torch.no_grad():
            query, key, _ = teacher.project(x)
            target = _target(teacher, query, key, positions)
        query, key, log_scale = student.kernel.map_heads(query, key, positions, positions, scaled=True)
        loss = kernel_cross_entropy(query, key, target, key_log_scale=log_scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _target(layer: SoftmaxAttention, query: Tensor, key: Tensor, positions: Tensor) -> Tensor:
    if layer.rotary is not None:
        query, key = layer.rotary.before(query, key, positions, positions)
    attended = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    bias = layer.logit_bias(query, key, positions, positions)
    return softmax_weights(query, key, attended.tril() if layer.causal else attended, bias)
