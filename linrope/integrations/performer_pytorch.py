"""Linear attention in place of performer-pytorch's, in its own models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from performer_pytorch.performer_pytorch import Attention, apply_rotary_pos_emb
from torch import Tensor, nn

from linrope.feature_maps import FavorPlus
from linrope.layers.heads import split_heads
from linrope.layers.kernel import KernelAttention
from linrope.rotary import Rotation


class PerformerAttention(nn.Module):
    """A performer-pytorch attention module with its projections and its random rows, computed by linrope.

    Theirs subtracts a maximum over the whole sequence and adds an epsilon, by which later tokens change earlier
    outputs, and masks values but not keys, by which padding counts in the normalizer; here neither happens.

    Args:
        attention: The module whose parameters are taken over; local heads are kept as they are.
        rotary: Rotates mapped queries and keys in the numerator; then the positions that the model gives, which
            rotate before the map, are left out. None: the model's own.
        redraw_interval: Optimizer steps between two draws of the rows by :func:`linrope.redraw_feature_maps`; None
            keeps them. The model's own updater no longer finds them.

    Raises:
        ValueError: The module computes another kernel: ``generalized_attention`` or ``no_projection``.
    """

    def __init__(
        self, attention: Attention, *, rotary: Rotation | None = None, redraw_interval: int | None = None
    ) -> None:
        super().__init__()
        fast: Any = attention.fast_attention
        if fast.generalized_attention or fast.no_projection:
            raise ValueError(
                "only FAVOR+ attention can be taken over, not one with generalized_attention or no_projection"
            )
        self.heads, self.global_heads, self.local_attn = attention.heads, attention.global_heads, attention.local_attn
        self.to_q, self.to_k, self.to_v, self.to_out = attention.to_q, attention.to_k, attention.to_v, attention.to_out
        self.dropout = attention.dropout
        self.kernel = KernelAttention(
            fast.dim_heads,
            self.global_heads,
            feature_map=partial(FavorPlus, num_features=fast.nb_features, redraw_interval=redraw_interval),
            rotary=rotary,
            causal=fast.causal,
        )
        self.kernel.to(fast.projection_matrix.device)
        self.kernel.get_buffer("feature_map.projection.rows").copy_(fast.projection_matrix)

    def forward(
        self,
        x: Float[Tensor, "b n dim"],
        pos_emb: Tensor | None = None,
        context: Float[Tensor, "b s dim"] | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
        context_mask: Bool[Tensor, "b s"] | None = None,
        **_: object,
    ) -> Float[Tensor, "b n dim"]:
        """Attend from ``x`` to ``context``, or to itself.

        Args:
            x: What queries are made of.
            pos_emb: The model's rotation of queries and keys, before the map.
            context: What keys and values are made of; ``x`` by default.
            mask: True where a token of ``x`` takes part.
            context_mask: True where a token of ``context`` takes part.
            _: What the model hands to every layer.
        """
        source = x if context is None else context
        inputs = (self.to_q(x), self.to_k(source), self.to_v(source))
        query, key, value = (split_heads(projected, self.heads) for projected in inputs)
        outputs = []
        if g := self.global_heads:
            q, k, v = query[:, :g], key[:, :g], value[:, :g]
            if pos_emb is not None and context is None and self.kernel.rotary is None:
                q, k = apply_rotary_pos_emb(q, k, pos_emb)
            key_mask = context_mask if context is not None or context_mask is not None else mask
            outputs.append(self.kernel(q, k, v, key_mask=key_mask))
        if self.local_attn is not None:
            if context is not None:
                raise ValueError("local attention is within one sequence: it takes no context")
            outputs.append(self.local_attn(query[:, g:], key[:, g:], value[:, g:], input_mask=mask))
        return self.dropout(self.to_out(rearrange(torch.cat(outputs, dim=1), "b h n d -> b n (h d)")))


def replace_attention(
    model: nn.Module, *, rotary: Rotation | None = None, redraw_interval: int | None = None
) -> list[str]:
    """Put :class:`PerformerAttention` in place of every attention of a performer-pytorch model.

    Args:
        model: A ``PerformerLM``, ``Performer`` or what holds one; changed in place.
        rotary: As in :class:`PerformerAttention`; one for all layers.
        redraw_interval: As in :class:`PerformerAttention`.

    Returns:
        Names of the modules that were replaced.

    Raises:
        ValueError: There is none to replace, or one computes another kernel; then nothing is changed.
    """
    new = {
        name: PerformerAttention(old, rotary=rotary, redraw_interval=redraw_interval).train(old.training)
        for name, old in model.named_modules()
        if isinstance(old, Attention) and name
    }
    if not new:
        raise ValueError(f"{type(model).__name__} holds no attention of performer-pytorch to replace")
    for name, module in new.items():
        model.set_submodule(name, module)
    return list(new)
