"""Linear attention in place of ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import linear

from linrope.attention import Backend, Normalizer
from linrope.feature_maps import EluPlusOne, FeatureMap
from linrope.layers.heads import head_dim_of, split_heads
from linrope.layers.kernel import KernelAttention
from linrope.rotary import Rotation


class LinearMultiheadAttention(nn.Module):
    """Linear attention with the arguments, parameters and calls of :class:`torch.nn.MultiheadAttention`.

    State dicts of either load into the other. It works inside ``nn.TransformerEncoderLayer`` and
    ``nn.TransformerDecoderLayer``, whose fused inference path, which computes softmax, is switched off by it.

    Args:
        embed_dim: Width of queries and outputs.
        num_heads: h; divides ``embed_dim``.
        dropout: Must be 0: there are no weights to drop.
        bias: Whether the projections have biases.
        add_bias_kv: Must be False.
        add_zero_attn: Must be False.
        kdim: Width of keys; ``embed_dim`` by default.
        vdim: Width of values; ``embed_dim`` by default.
        batch_first: Whether inputs are ``(b, n, embed_dim)`` and not ``(n, b, embed_dim)``.
        device: Of the parameters.
        dtype: Of the parameters.
        feature_map: As in :class:`linrope.KernelAttention`.
        rotary: As in :class:`linrope.KernelAttention`.
        rotary_placement: As in :class:`linrope.KernelAttention`.
        normalizer: As in :class:`linrope.KernelAttention`.
        backend: As in :class:`linrope.KernelAttention`.

    Raises:
        ValueError: What linear attention has no counterpart for, sizes that do not fit, or as
            :class:`linrope.KernelAttention`.
    """

    # torch's encoder layers ask for it, and compute softmax by themselves where it is True.
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        feature_map: Callable[[int], FeatureMap] = EluPlusOne,
        rotary: Rotation | None = None,
        rotary_placement: Literal["numerator", "before"] = "numerator",
        normalizer: Normalizer = "features",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if dropout:
            raise ValueError(f"linear attention has no weights to drop: dropout must be 0, got {dropout}")
        if add_bias_kv or add_zero_attn:
            raise ValueError("linear attention takes no added keys: add_bias_kv and add_zero_attn must be False")
        head_dim = head_dim_of(embed_dim, num_heads)
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        # The parameters are torch's own, by name, shape and first values.
        like = nn.MultiheadAttention(embed_dim, num_heads, 0.0, bias, kdim=kdim, vdim=vdim, device=device, dtype=dtype)
        for name, parameter in like.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        if not bias:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj.load_state_dict(like.out_proj.state_dict())
        self.kernel = KernelAttention(
            head_dim,
            num_heads,
            feature_map=feature_map,
            rotary=rotary,
            rotary_placement=rotary_placement,
            causal=False,
            normalizer=normalizer,
            backend=backend,
        ).to(device=device, dtype=dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as :meth:`torch.nn.MultiheadAttention.forward` does.

        Args:
            query: ``(n, b, embed_dim)``, ``(b, n, embed_dim)`` if ``batch_first``, or ``(n, embed_dim)``.
            key: The same of length s and width kdim.
            value: The same of length s and width vdim.
            key_padding_mask: ``(b, s)`` or ``(s,)``: True, or -inf, where a key takes no part.
            need_weights: Whether to return the weights, which takes memory for n × s of them; they may be negative
                where a rotation is in the numerator.
            attn_mask: None, the causal mask, or one that masks nothing: linear attention has no others.
            average_attn_weights: Whether the weights are averaged over heads.
            is_causal: Whether a token attends to itself and earlier tokens alone; then ``attn_mask`` is not looked at.

        Returns:
            The output, shaped as ``query``, and the weights ``(b, n, s)``, ``(b, h, n, s)``, either without b, or None.

        Raises:
            ValueError: Another mask, weights of attention that is not normalized by features, or shapes that do not
                fit.
        """
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            raise ValueError(
                "query, key and value must all be batched, with 3 axes, or not, with 2; "
                f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        batched = query.ndim == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        n, s = query.shape[1], key.shape[1]
        causal = is_causal or (attn_mask is not None and _is_causal(attn_mask, n, s))
        query, key, value = (split_heads(x, self.num_heads) for x in self._project(query, key, value))
        key_mask = None if key_padding_mask is None else _allowed("key_padding_mask", key_padding_mask)
        output = self.kernel(query, key, value, key_mask=key_mask, causal=causal)
        output = self.out_proj(rearrange(output, "b h n e -> b n (h e)"))
        weights = self._weights(query, key, value, key_mask, causal) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _project(self, *inputs: Tensor) -> list[Tensor]:
        if self.kdim == self.vdim == self.embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]

    def _weights(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, causal: bool) -> Tensor:
        """What each key's value counts: the outputs for the unit vectors as values."""
        if self.kernel.normalizer != "features":
            raise ValueError(
                f"with normalizer={self.kernel.normalizer!r} there are no weights: pass need_weights=False"
            )
        s = key.shape[2]
        units = torch.eye(s, dtype=value.dtype, device=value.device).expand(*key.shape[:2], s, s)
        return self.kernel(query, key, units, key_mask=key_mask, causal=causal)


def _allowed(name: str, mask: Tensor) -> Tensor:
    """True where something takes part, of a mask that is True, or -inf, where it does not."""
    if mask.dtype == torch.bool:
        return ~mask
    allowed = mask == 0
    if not (allowed | (mask == -torch.inf)).all():
        raise ValueError(f"{name} must be bool, or hold 0 and -inf alone: linear attention adds nothing to scores")
    return allowed


def _is_causal(mask: Tensor, n: int, s: int) -> bool:
    """Whether a mask of pairs is the causal one; False if it masks nothing."""
    allowed = _allowed("attn_mask", mask)
    if allowed.all():
        return False
    if allowed.shape[-2:] == (n, s) and n == s and bool((allowed == allowed.new_ones(n, s).tril()).all()):
        return True
    raise ValueError(
        f"attn_mask must be the causal one, {(n, s)}, or mask nothing: linear attention has no masks of other pairs; "
        f"got {tuple(mask.shape)}"
    )


def replace_attention(
    model: nn.Module,
    *,
    feature_map: Callable[[int], FeatureMap] = EluPlusOne,
    rotary: Rotation | None = None,
    rotary_placement: Literal["numerator", "before"] = "numerator",
    normalizer: Normalizer = "features",
    backend: Backend = "auto",
) -> list[str]:
    """Put linear attention in place of every ``nn.MultiheadAttention`` in ``model``, keeping its projections.

    The new modules own the very parameters of the old ones, so that an optimizer made before goes on with them.
    Dropout of attention weights, of which there are none, is left out.

    Args:
        model: Changed in place.
        feature_map: As in :class:`linrope.KernelAttention`.
        rotary: As in :class:`linrope.KernelAttention`; one for all modules.
        rotary_placement: As in :class:`linrope.KernelAttention`.
        normalizer: As in :class:`linrope.KernelAttention`.
        backend: As in :class:`linrope.KernelAttention`.

    Returns:
        Names of the modules that were replaced.

    Raises:
        ValueError: There is none to replace, or one has what linear attention has no counterpart for; then nothing is
            changed.
    """
    if isinstance(model, nn.MultiheadAttention):
        raise ValueError("the model is itself a MultiheadAttention: put it inside a module, or make a new one")
    new: dict[str, LinearMultiheadAttention] = {}
    made: dict[nn.Module, LinearMultiheadAttention] = {}
    for name, old in model.named_modules(remove_duplicate=False):
        if not isinstance(old, nn.MultiheadAttention):
            continue
        if old in made:  # one module in two places stays one
            new[name] = made[old]
            continue
        linear_one = LinearMultiheadAttention(
            old.embed_dim,
            old.num_heads,
            bias=old.in_proj_bias is not None,
            add_bias_kv=old.bias_k is not None,
            add_zero_attn=old.add_zero_attn,
            kdim=old.kdim,
            vdim=old.vdim,
            batch_first=old.batch_first,
            device=old.out_proj.weight.device,
            dtype=old.out_proj.weight.dtype,
            feature_map=feature_map,
            rotary=rotary,
            rotary_placement=rotary_placement,
            normalizer=normalizer,
            backend=backend,
        )
        for parameter_name, parameter in old.named_parameters(recurse=False):
            linear_one.register_parameter(parameter_name, parameter)
        linear_one.out_proj = old.out_proj
        new[name] = made[old] = linear_one.train(old.training)
    if not new:
        raise ValueError(f"{type(model).__name__} holds no nn.MultiheadAttention to replace")
    for name, linear_one in new.items():
        model.set_submodule(name, linear_one)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # decided when it was made; nested tensors are for softmax alone
    return list(new)
