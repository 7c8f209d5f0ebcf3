"""Multi-head linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linrope.attention import Backend, DecayPlacement, Normalizer, State
from linrope.decay import Decay
from linrope.feature_maps import EluPlusOne, FeatureMap
from linrope.layers.heads import Heads, Projections, head_dim_of, project, project_next
from linrope.layers.kernel import KernelAttention
from linrope.layers.short_conv import ShortConvState, make_short_convs
from linrope.rotary import Rotation


class LinearAttention(nn.Module):
    """Multi-head linear attention, for self- and cross-attention: :class:`KernelAttention` between projections.

    Args:
        d_model: Width of inputs and outputs.
        num_heads: h; divides ``d_model``.
        feature_map: As in :class:`KernelAttention`, with head_dim = d_model / h.
        rotary: As in :class:`KernelAttention`.
        rotary_placement: As in :class:`KernelAttention`.
        causal: Whether a token attends to itself and earlier tokens alone.
        bias: Whether the four projections have biases.
        chunk_size: As in :class:`KernelAttention`.
        backend: As in :class:`KernelAttention`.
        normalizer: As in :class:`KernelAttention`; the output projection holds the gains of ``"rms"``.
        num_kv_heads: Heads of keys and values, each of which serves as many heads of queries; h by default.
        decay: As in :class:`KernelAttention`.
        decay_placement: As in :class:`KernelAttention`.
        short_conv: Width, in tokens, of a causal convolution of projected queries, keys and values each
            (:class:`ShortConv`); None: no convolution.

    Raises:
        ValueError: ``num_heads`` does not divide ``d_model``, ``num_kv_heads`` not ``num_heads``, a ``short_conv`` below 2 or
            where not causal, or as :class:`KernelAttention`.

    Source: Su et al. 2021 (arXiv 2104.09864), eq. 19.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        feature_map: Callable[[int], FeatureMap] = EluPlusOne,
        rotary: Rotation | None = None,
        rotary_placement: Literal["numerator", "before"] = "numerator",
        causal: bool = True,
        bias: bool = False,
        chunk_size: int | None = None,
        backend: Backend = "auto",
        normalizer: Normalizer = "features",
        num_kv_heads: int | None = None,
        decay: Decay | None = None,
        decay_placement: DecayPlacement = "both",
        short_conv: int | None = None,
    ) -> None:
        super().__init__()
        head_dim = head_dim_of(d_model, num_heads)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}")
        widths = (d_model, *[self.num_kv_heads * head_dim] * 2, d_model)
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, width, bias=bias) for width in widths)
        self.short_conv = short_conv
        self.query_conv, self.key_conv, self.value_conv = make_short_convs(
            short_conv, widths[0], widths[1], causal=causal
        )
        self.kernel = KernelAttention(
            head_dim,
            num_heads,
            feature_map=feature_map,
            rotary=rotary,
            rotary_placement=rotary_placement,
            causal=causal,
            chunk_size=chunk_size,
            backend=backend,
            normalizer=normalizer,
            decay=decay,
            decay_placement=decay_placement,
        )

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b s d_model"] | None = None,
        *,
        key_mask: Bool[Tensor, "b s"] | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
        context_positions: Int[Tensor, "*b s"] | None = None,
        offsets: Int[Tensor, " p+1"] | None = None,
    ) -> Float[Tensor, "b n d_model"]:
        """Attend from ``x`` to ``context``, or to itself.

        Args:
            x: What queries are made of.
            context: What keys and values are made of; ``x`` by default.
            key_mask: True where a key takes part.
            positions: Of ``x``, in tokens; 0, 1, … by default.
            context_positions: Of ``context``, in tokens; 0, 1, … by default.
            offsets: Of sequences packed into one row; see :func:`linrope.linear_attention`.

        Raises:
            ValueError: Shapes that do not fit; another length of ``context`` where the layer is causal.
        """
        query, key, value = self.project(x, context, key_mask=key_mask, offsets=offsets)
        output = self.kernel(
            query,
            key,
            value,
            key_mask=key_mask,
            query_positions=positions,
            key_positions=positions if context is None else context_positions,
            offsets=offsets,
        )
        return self.out(rearrange(output, "b h n e -> b n (h e)"))

    def stream(
        self,
        x: Float[Tensor, "b n d_model"],
        state: State | ShortConvState | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n d_model"], State | ShortConvState]:
        """Attend from the next tokens to themselves and all before them; returns outputs and the new state.

        Args:
            x: The next tokens, any number of them.
            state: What the call for the tokens before returned; None at the start.
            key_mask: True where a key takes part.
            positions: In tokens; by default they go on from ``state.position``.

        Raises:
            ValueError: The layer is not causal, or shapes do not fit.
        """
        heads, before, inputs = project_next(self._projections, x, state, key_mask=key_mask)
        output, after = self.kernel.stream(*heads, before, key_mask=key_mask, positions=positions)
        output = self.out(rearrange(output, "b h n e -> b n (h e)"))
        return output, ShortConvState(after, *inputs) if inputs else after

    def project(
        self,
        x: Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b s d_model"] | None = None,
        *,
        key_mask: Bool[Tensor, "b s"] | None = None,
        offsets: Int[Tensor, " p+1"] | None = None,
    ) -> Heads:
        """Queries, keys and values by heads, as they are before any map or rotation; arguments as in :meth:`forward`."""
        return project(self._projections, x, context, key_mask=key_mask, offsets=offsets)

    @property
    def _projections(self) -> Projections:
        convs = (self.query_conv, self.key_conv, self.value_conv)
        return Projections((self.query, self.key, self.value), convs, self.head_dim)

    @property
    def causal(self) -> bool:
        """Whether a token attends to itself and earlier tokens alone."""
        return self.kernel.causal

    @property
    def feature_map(self) -> FeatureMap:
        """The map, one for all heads or with parameters for each."""
        return self.kernel.feature_map

    @property
    def rotary(self) -> Rotation | None:
        """The rotation, if there is one."""
        return self.kernel.rotary

    def extra_repr(self) -> str:  # noqa: D102
        shared = f", num_kv_heads={self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        return f"num_heads={self.num_heads}{shared}"
