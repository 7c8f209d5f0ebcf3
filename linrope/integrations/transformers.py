"""Linear attention in models of Hugging Face's transformers.

Importing this registers the attention ``"linrope"``, elu + 1, for every model that dispatches through transformers'
AttentionInterface: ``model.set_attn_implementation("linrope")`` then computes with it, until it is set back. Llama and
others that rotate queries and keys do so before they are handed over: that is placement ``"before"``.
:func:`replace_attention` gives each layer a feature map of its own, of any kind, and can take the rotation over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.models.bert.modeling_bert import BertCrossAttention, BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from linrope.attention import Backend, Normalizer
from linrope.feature_maps import EluPlusOne, FeatureMap, redraw_feature_maps
from linrope.layers.heads import split_heads
from linrope.layers.kernel import KernelAttention
from linrope.rotary import Rotary

NAME = "linrope"

# Arguments by which models ask for what linear attention cannot do, where they are anything but None.
_IMPOSSIBLE = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")


def linear_attention_forward(
    module: nn.Module,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b k s d"],
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
        key: Those in the model's cache included.
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
        _attend(kernel, query, key, value, attention_mask, causal, position_ids), "b h n e -> b n h e"
    ), None


def _attend(
    kernel: KernelAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    positions: Tensor | None,
) -> Float[Tensor, "b h n e"]:
    """Attend from the last n of the s tokens if ``causal``, else from all n to all s."""
    n, s = query.shape[2], key.shape[2]
    key_mask = _key_mask(mask, n, s, causal)
    if not causal:
        return kernel(query, key, value, key_mask=key_mask, query_positions=positions, causal=False)
    if s < n:
        raise ValueError(f"causal attention needs a key for every query, got {s} keys and {n} queries")
    if positions is None:
        positions = torch.arange(s - n, s, device=query.device)
    before = torch.arange(n - s, 0, device=query.device)
    key_positions = torch.cat((positions[..., :1] + before, positions), dim=-1)
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
        output = _attend(self.linrope, query, key, value, attention_mask, self.is_causal, None)
        return rearrange(output, "b h n e -> b n (h e)"), None


def replace_attention(
    model: PreTrainedModel,
    *,
    feature_map: Callable[[int], FeatureMap] = EluPlusOne,
    rotary: Rotary | None = None,
    rotary_placement: Literal["before", "numerator"] = "before",
    normalizer: Normalizer = "features",
    backend: Backend = "auto",
) -> list[str]:
    """Compute every attention of a GPT-2, BERT, Llama or RoFormer by a :class:`linrope.KernelAttention` of its own.

    Projections are kept; each attention module gets a submodule ``linrope``, so that the parameters of learned maps are
    trained and saved. Attention dropout is set to 0, for there are no weights to drop. Generation goes on from the model's
    own cache of keys and values, at a cost that grows with it.

    Args:
        model: Changed in place.
        feature_map: As in :class:`linrope.KernelAttention`.
        rotary: A rotation for models that have none. For Llama and RoFormer, which rotate by themselves, the rotation in
            the numerator, with the model's own base where it is None.
        rotary_placement: ``"before"`` leaves a Llama's or RoFormer's rotation where it is, before the map; ``"numerator"``
            takes it over: mapped queries and keys turn, in the numerator alone, and nothing turns before.
        normalizer: As in :class:`linrope.KernelAttention`.
        backend: As in :class:`linrope.KernelAttention`.

    Returns:
        Names of the attention modules.

    Raises:
        ValueError: A model of another kind, one that has cross-attention and rotates, a rotation that is scaled or would
            happen twice, or as :class:`linrope.KernelAttention`; then nothing is changed.
    """
    kinds = (GPT2Attention, BertSelfAttention, BertCrossAttention, LlamaAttention, RoFormerSelfAttention)
    old = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    if not old:
        raise ValueError(
            f"only attention of GPT-2, BERT, Llama and RoFormer can be replaced, got {type(model).__name__}"
        )
    kernels = {}
    for name, module in old.items():
        rotates = isinstance(module, (LlamaAttention, RoFormerSelfAttention))
        if isinstance(module, RoFormerSelfAttention) and getattr(model.config, "add_cross_attention", False):
            raise ValueError("a RoFormer with cross-attention cannot be replaced")
        turn = rotary
        if rotates and rotary_placement == "numerator":
            turn = rotary or _rotation_of(model.config, module)
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
    if any(not isinstance(module, RoFormerSelfAttention) for module in old.values()):
        model.set_attn_implementation(NAME)
    return list(old)


def _leave_unrotated(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let a Llama's attention turn its queries and keys by nothing."""
    cos, sin = kwargs["position_embeddings"]
    return args, kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


def _rotation_of(config: Any, module: nn.Module) -> Rotary:
    """The rotation that a Llama or RoFormer makes, for any width."""
    if isinstance(module, RoFormerSelfAttention):
        return Rotary()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"this model's rotation is scaled ({rope['rope_type']}): pass the rotary that is to replace it"
        )
    return Rotary(rope.get("rope_theta", 10_000.0), pairing="half")


def _heads(module: Any) -> tuple[int, int]:
    """Number of query heads, and their width."""
    if isinstance(module, GPT2Attention):
        return module.num_heads, module.head_dim
    if isinstance(module, LlamaAttention):
        return module.config.num_attention_heads, module.head_dim
    return module.num_attention_heads, module.attention_head_size
