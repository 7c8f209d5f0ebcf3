"""Fit a learned feature map to the attention of a softmax layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from linrope.feature_maps import FeatureMap
from linrope.layers import LinearAttention, SoftmaxAttention
from linrope.layers.heads import split_heads


def attention_cross_entropy(
    feature_map: FeatureMap,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b h n d"],
    *,
    causal: bool = True,
) -> Float[Tensor, ""]:
    """Mean over queries of -Σ_s p_ts ln w_ts, in nats, with p = softmax(q·k/√d) and w = φ(q)·φ(k) / Σ φ(q)·φ(k).

    It is least, the entropy of p, where the two agree. Memory is quadratic in n.

    Args:
        feature_map: φ, whose kernel is positive.
        query: Queries as the map will get them, so rotated where a rotation stands before it.
        key: Keys, likewise.
        causal: Whether a token attends to itself and earlier tokens alone.

    Raises:
        ValueError: The kernel of ``feature_map`` can be 0 or negative.

    Source: Zhang et al. 2024 (arXiv 2402.04347), section 4.2.
    """
    if not feature_map.kernel_is_positive:
        raise ValueError(
            f"the kernel of {type(feature_map).__name__} can be 0 or negative; its logarithm is needed here"
        )
    n = query.shape[2]
    future = torch.ones(n, n, dtype=torch.bool, device=query.device).triu(1) if causal else None
    scores = query @ key.mT / query.shape[-1] ** 0.5
    where = (torch.arange(n, device=query.device),) if feature_map.uses_positions else ()
    features, log_scale = feature_map.scaled_key(key, *where)
    kernel = feature_map.scaled_query(query, *where) @ features.mT
    # The least positive number where a product vanished: its logarithm stays finite, its gradient is 0.
    log_kernel = kernel.clamp_min(torch.finfo(kernel.dtype).tiny).log()
    if log_scale is not None:
        log_kernel = log_kernel + log_scale[:, :, None]
    if future is not None:
        scores, log_kernel = scores.masked_fill(future, -torch.inf), log_kernel.masked_fill(future, -torch.inf)
    p = scores.softmax(-1)
    log_w = log_kernel.log_softmax(-1)
    if future is not None:
        log_w = log_w.masked_fill(future, 0.0)  # 0 · -inf is not 0
    return -(p * log_w).sum(-1).mean()


def fit_to_softmax(
    student: LinearAttention,
    teacher: SoftmaxAttention,
    inputs: Iterable[Float[Tensor, "b n d_model"]],
    *,
    learning_rate: float = 1e-2,
) -> list[float]:
    """Give ``student`` the projections of ``teacher``, then train its feature map to attend alike.

    One AdamW step on :func:`attention_cross_entropy` for each of ``inputs``; only the map is trained. A rotation before
    the map is part of what is fitted; one in the numerator comes after it and is not.

    Args:
        student: Layer whose feature map has parameters.
        teacher: Layer with the same sizes.
        inputs: What the layers read.
        learning_rate: Of AdamW.

    Returns:
        The loss of each step, before it, in nats.

    Raises:
        ValueError: A map without parameters, layers of different sizes, or one causal and one not.
    """
    if not list(student.feature_map.parameters()):
        raise ValueError(f"{type(student.feature_map).__name__} has no parameters to fit")
    sizes = [(layer.query.in_features, layer.num_heads, layer.causal) for layer in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"(d_model, num_heads, causal) must agree, got {sizes[0]} and {sizes[1]}")
    for name in ("query", "key", "value", "out"):
        getattr(student, name).load_state_dict(getattr(teacher, name).state_dict())
    optimizer = torch.optim.AdamW(student.feature_map.parameters(), lr=learning_rate, weight_decay=0.0)
    losses = []
    for x in inputs:
        with torch.no_grad():
            query, key = (split_heads(project(x), teacher.num_heads) for project in (teacher.query, teacher.key))
            if teacher.rotary is not None:
                positions = torch.arange(x.shape[1], device=x.device)
                query, key = teacher.rotary(query, positions), teacher.rotary(key, positions)
        loss = attention_cross_entropy(student.feature_map, query, key, causal=teacher.causal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
