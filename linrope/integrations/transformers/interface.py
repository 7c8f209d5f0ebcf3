"""The functions by which transformers computes attention and masks, under the name ``"linrope"``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from linrope.integrations.transformers.cache import NewKeys
from linrope.layers.kernel import KernelAttention

NAME = "linrope"

# Arguments by which models ask for what linear attention cannot do, where they are anything but None.
_IMPOSSIBLE = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q")


def linear_attention_forward(
    module: nn.Module,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b k s d"] | NewKeys,
    value: Float[Tensor, "b k s e"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_ids: Int[Tensor, "*b n"] | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "b n h e"], None]:
    """Attend, as transformers asks of an attention function.

    Args:
        module: The model's attention module; its ``linrope`` attends, or else elu + 1 without a rotation.
        query: Of the last n of the s keys where ``module`` is causal.
        key: Those in the model's cache included, or new ones with the state that stands for the others.
        value: As many.
        attention_mask: True where a key takes part, b s, or a mask of pairs that says no more than that.
        dropout: Must be 0: there are no weights to drop.
        scaling: Of q·k, 1/√d by default; maps that stand for softmax see queries scaled accordingly.
        is_causal: In place of the module's own.
        position_ids: Of the queries; earlier keys are taken to lie one token before each other.
        others: What the model passes on to every attention.

    Returns:
        The outputs, and None for the weights.

    Raises:
        ValueError: Dropout, or what linear attention cannot do: masks of other pairs, windows, weights.
    """
    if dropout:
        raise ValueError(
            f"linear attention has no weights to drop: set the model's attention dropout, {dropout:g}, to 0 (attn_pdrop, "
            "attention_dropout or attention_probs_dropout_prob in its config), or use replace_attention, which does"
        )
    if others.get("output_attentions"):
        raise ValueError("linear attention never forms its weights: output_attentions must be False")
    if asked := [name for name in _IMPOSSIBLE if others.get(name) is not None]:
        raise ValueError(f"linear attention cannot do what this model asks for: {', '.join(asked)}")
    h, d = query.shape[1], query.shape[3]
    kernel = getattr(module, NAME, None) or _default_kernel(d, h)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if scaling is not None and scaling != d**-0.5:
        query = query * (scaling * d**0.5)
    return rearrange(
        attend(kernel, query, key, value, attention_mask, causal, position_ids), "b h n e -> b n h e"
    ), None


def attend(
    kernel: KernelAttention,
    query: Tensor,
    key: Tensor | NewKeys,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    positions: Tensor | None,
) -> Float[Tensor, "b h n e"]:
    """Attend from the last n of the s tokens if ``causal``, else from all n to all s; from a state where the cache holds one.

    Raises:
        ValueError: As :func:`linear_attention_forward`.
    """
    n = query.shape[2]
    if isinstance(key, NewKeys):
        new_mask = _key_mask(mask, n, n, causal)
        stream = kernel.stream(query, key.keys, value, key.layer.state, key_mask=new_mask, positions=positions)
        output, key.layer.state = stream
        return output
    s = key.shape[2]
    key_mask = _key_mask(mask, n, s, causal)
    if not causal:
        of_keys = positions if s == n else None
        return kernel(
            query, key, value, key_mask=key_mask, query_positions=positions, key_positions=of_keys, causal=False
        )
    if s < n:
        raise ValueError(f"causal attention needs a key for every query, got {s} keys and {n} queries")
    uses_positions = kernel.rotary is not None or kernel.feature_map.uses_positions
    if uses_positions and n < s and key_mask is not None and (key_mask[:, :-1] & ~key_mask[:, 1:]).any():
        raise ValueError(
            "tokens behind padding have no position that could be told: pad on the left to go on from a cache"
        )
    if positions is None:
        positions = torch.arange(s - n, s, device=query.device)
    before = torch.arange(n - s, 0, device=query.device)
    # Padding on the left comes before position 0, where some maps know no position.
    key_positions = torch.cat(((positions[..., :1] + before).clamp_min(0), positions), dim=-1)
    if n == 1:  # every key there is
        options = {"query_positions": positions, "key_positions": key_positions, "causal": False}
        return kernel(query, key, value, key_mask=key_mask, **options)
    query = pad(query, (0, 0, s - n, 0))  # for the tokens before, whose outputs are known
    output = kernel(query, key, value, key_mask=key_mask, query_positions=key_positions, causal=True)
    return output[:, :, s - n :]


def _key_mask(mask: Tensor | None, n: int, s: int, causal: bool) -> Bool[Tensor, "b s"] | None:
    """Which keys take part, of a mask of keys or of pairs."""
    if mask is None:
        return None
    if mask.ndim == 2:
        if mask.shape[1] != s:
            raise ValueError(f"attention_mask must be of {s} keys, got {tuple(mask.shape)}: is the cache a static one?")
        return mask.bool()
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (allowed | (mask <= -1e4)).all():
        raise ValueError("linear attention adds nothing to scores: attention_mask must hold 0 and -inf alone")
    keys = allowed[:, 0, -1, -s:]
    expected = keys[:, None, None].expand(-1, -1, allowed.shape[2], -1)
    if causal and allowed.shape[2] == n:
        expected = expected & torch.ones(n, s, dtype=torch.bool, device=mask.device).tril(s - n)
    # What a query without any key attends to does not matter.
    if not (allowed[..., -s:] == expected)[expected.any(-1).expand(allowed.shape[:-1])].all():
        raise ValueError("linear attention has no masks of single pairs: attention_mask may hide keys, and no more")
    return keys.expand(mask.shape[0], s)


@cache
def _default_kernel(head_dim: int, num_heads: int) -> KernelAttention:
    return KernelAttention(head_dim, num_heads)


def linear_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Bool[Tensor, "b s"] | None:
    """Hand the mask of keys on as it is, as transformers asks of a mask function; None where all take part.

    Raises:
        ValueError: The model asks for other than causal or full attention, or its cache is longer than what it holds.
    """
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            "linear attention is causal or full: it has no sliding windows, chunks, or sequences packed by position_ids"
        )
    if mask_function is causal_mask_function and kv_length != int(q_offset) + q_length - int(kv_offset):
        raise ValueError("linear attention needs a cache that grows, a DynamicCache, and no static one")
    return None if attention_mask is None else attention_mask[:, -kv_length:].bool()


AttentionInterface.register(NAME, linear_attention_forward)
AttentionMaskInterface.register(NAME, linear_attention_mask)
