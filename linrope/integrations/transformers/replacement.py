"""Attention of transformers' models, computed by a kernel attention of each layer's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.bert.modeling_bert import BertCrossAttention, BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from linrope.attention import Backend, Normalizer
from linrope.feature_maps import EluPlusOne, FeatureMap, redraw_feature_maps
from linrope.integrations.transformers.interface import NAME, attend
from linrope.integrations.transformers.rotations import rotation_of
from linrope.layers.heads import split_heads
from linrope.layers.kernel import KernelAttention
from linrope.rotary import Rotary, Rotation


class RoFormerAttention(nn.Module):
    """The self-attention of a RoFormer, which does not dispatch, with its projections, computed by linrope.

    Args:
        attention: The module whose parameters are taken over.
        kernel: What attends; where it rotates in the numerator the model's own rotation is left out.
    """

    def __init__(self, attention: RoFormerSelfAttention, kernel: KernelAttention) -> None:
        super().__init__()
        self.query, self.key, self.value = attention.query, attention.key, attention.value
        self.num_heads, self.layer_idx = attention.num_attention_heads, attention.layer_idx
        self.is_causal, self.rotary_value = bool(attention.is_decoder), attention.rotary_value
        self.linrope = kernel

    def forward(
        self,
        hidden_states: Float[Tensor, "b n d_model"],
        attention_mask: Tensor | None = None,
        sinusoidal_pos: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        cache: Any = None,
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[Float[Tensor, "b n d_model"], None]:
        """Attend to the sequence itself, and to what ``cache`` holds of it.

        Raises:
            ValueError: ``encoder_hidden_states``, or what :func:`linear_attention_forward` cannot do.
        """
        if encoder_hidden_states is not None or output_attentions:
            raise ValueError("neither cross-attention nor its weights can be had of a RoFormer's linear attention")
        query, key, value = (split_heads(f(hidden_states), self.num_heads) for f in (self.query, self.key, self.value))
        if sinusoidal_pos is not None and self.linrope.rotary is None:
            turned = (query, key, value) if self.rotary_value else (query, key)
            query, key, *rest = RoFormerSelfAttention.apply_rotary_position_embeddings(sinusoidal_pos, *turned)
            value = rest[0] if rest else value
        if cache is not None:
            cache = getattr(cache, "self_attention_cache", cache)
            key, value = cache.update(key, value, self.layer_idx)
        output = attend(self.linrope, query, key, value, attention_mask, self.is_causal, None)
        return rearrange(output, "b h n e -> b n (h e)"), None


def replace_attention(
    model: nn.Module,
    *,
    feature_map: Callable[[int], FeatureMap] = EluPlusOne,
    rotary: Rotation | None = None,
    rotary_placement: Literal["before", "numerator"] = "before",
    normalizer: Normalizer = "features",
    backend: Backend = "auto",
) -> list[str]:
    """Compute every attention of a GPT-2, BERT, Llama or RoFormer by a :class:`linrope.KernelAttention` of its own.

    Projections are kept, and ``model.set_attn_implementation`` sets a GPT-2, BERT or Llama back. Each attention module
    gets a submodule ``linrope``, so that the parameters of learned maps are trained and saved. Attention dropout is set
    to 0, for there are no weights to drop. Generation goes on from the model's own cache of keys and values, at a cost
    that grows with it, or from a :func:`state_cache`.

    Args:
        model: One of them, or what holds some; changed in place.
        feature_map: As in :class:`linrope.KernelAttention`.
        rotary: A rotation of self-attention for models that have none. For Llama and RoFormer, which rotate by
            themselves, the rotation in the numerator, with the model's own base and scaling where it is None.
        rotary_placement: ``"before"`` leaves a Llama's or RoFormer's rotation where it is, before the map; ``"numerator"``
            takes it over: mapped queries and keys turn, in the numerator alone, and nothing turns before.
        normalizer: As in :class:`linrope.KernelAttention`.
        backend: As in :class:`linrope.KernelAttention`.

    Returns:
        Names of the attention modules.

    Raises:
        ValueError: A model of another kind or one replaced already, one that has cross-attention and rotates, a
            rotation that would happen twice or is scaled in a way that is not known here, or as
            :class:`linrope.KernelAttention`; then nothing is changed.
    """
    kinds = (GPT2Attention, BertSelfAttention, BertCrossAttention, LlamaAttention, RoFormerSelfAttention)
    old = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    if not old and not any(isinstance(module, RoFormerAttention) for module in model.modules()):
        raise ValueError(
            f"only attention of GPT-2, BERT, Llama and RoFormer can be replaced, got {type(model).__name__}"
        )
    if any(hasattr(module, NAME) for module in model.modules()):
        raise ValueError("this model's attention has been replaced already")
    kernels = {}
    for name, module in old.items():
        rotates = isinstance(module, (LlamaAttention, RoFormerSelfAttention))
        if isinstance(module, RoFormerSelfAttention) and "crossattention" in name:
            raise ValueError("a RoFormer with cross-attention cannot be replaced")
        is_cross = isinstance(module, BertCrossAttention) or getattr(module, "is_cross_attention", False)
        turn = None if is_cross else rotary  # what is attended to has positions of its own
        if rotates and rotary_placement == "numerator":
            turn = rotary or (Rotary() if isinstance(module, RoFormerSelfAttention) else rotation_of(module.config))
        elif rotates and rotary is not None:
            raise ValueError(
                f"{type(model).__name__} rotates by itself: pass rotary_placement='numerator', or no rotary"
            )
        heads, width = _heads(module)
        kernels[name] = KernelAttention(
            width,
            heads,
            feature_map=feature_map,
            rotary=turn,
            rotary_placement=rotary_placement,
            causal=bool(getattr(module, "is_causal", getattr(module, "is_decoder", False))),
            normalizer=normalizer,
            backend=backend,
        )
    for name, module in old.items():
        like = next(module.parameters())
        kernel = kernels[name].to(like.device, like.dtype).train(module.training)
        if isinstance(module, RoFormerSelfAttention):
            model.set_submodule(name, RoFormerAttention(module, kernel).train(module.training))
            continue
        module.add_module(NAME, kernel)
        for dropout in ("attn_dropout", "dropout"):  # of GPT-2, of BERT
            if isinstance(getattr(module, dropout, None), nn.Dropout):
                getattr(module, dropout).p = 0.0
        if isinstance(module, LlamaAttention):
            module.attention_dropout = 0.0
            if kernel.rotary is not None:
                module.register_forward_pre_hook(_leave_unrotated, with_kwargs=True)
    redraw_feature_maps(model, step=0)  # layers differ
    # Copies: other models may have been made from the same configuration.
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config = copy.deepcopy(module.config, copies)
    for module in old.values():
        if not isinstance(module, RoFormerSelfAttention):
            module.config._attn_implementation = NAME  # type: ignore[union-attr]
    return list(old)


def _leave_unrotated(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let a Llama's attention turn its queries and keys by nothing."""
    if module.config._attn_implementation != NAME:  # it was set back
        return args, kwargs
    cos, sin = kwargs["position_embeddings"]
    return args, kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


def _heads(module: Any) -> tuple[int, int]:
    """Number of query heads, and their width."""
    if isinstance(module, GPT2Attention):
        return module.num_heads, module.head_dim
    if isinstance(module, LlamaAttention):
        return module.config.num_attention_heads, module.head_dim
    return module.num_attention_heads, module.attention_head_size
