"""Linear attention between heads: the feature map, the rotation and the normalizer, without projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linrope.attention import (
    Backend,
    DecayPlacement,
    Normalizer,
    State,
    linear_attention,
    stream_linear_attention,
)
from linrope.attention.packing import check_offsets, packed_positions
from linrope.decay import Decay
from linrope.feature_maps import EluPlusOne, FeatureMap
from linrope.layers.heads import next_positions, share_heads
from linrope.rotary import Rotation, check_rotary, check_streams


class KernelAttention(nn.Module):
    """Linear attention of queries, keys and values that are given by heads: what stands between two projections.

    Args:
        head_dim: d, the width of queries and keys.
        num_heads: h.
        feature_map: Factory that gets head_dim: a class, a ``functools.partial``.
        rotary: The rotation, or None for no rotation. Where it would turn an odd number of features,
            the last of them passes through.
        rotary_placement: ``"numerator"`` rotates mapped queries and keys, in the numerator alone
            (RoFormer, eq. 19); ``"before"`` rotates queries and keys before they are mapped, as
            performer-pytorch does. A rotated product far below ‖φ(q)‖‖φ(k)‖ is the difference of larger
            ones and rounded with them, by 1e-7 of their size in float32: exponential maps of queries and
            keys far longer than a layer norm's want ``"before"``.
        causal: Whether a token attends to itself and earlier tokens alone.
        chunk_size: Tokens per block of the causal form; changes speed and memory, not the result.
        backend: See :func:`linrope.linear_attention`.
        normalizer: ``"features"`` divides by the sum of the kernel, for maps whose kernel is positive;
            ``"rms"`` gives each head's output a root mean square of 1 instead (a projection after it holds
            the gains), and None leaves it as it is. See :func:`linrope.linear_attention`.
        decay: How fast heads forget with distance, or None: not at all. Causal attention alone.
        decay_placement: Whether they do in ``"both"`` sums or in the ``"numerator"`` alone.

    Raises:
        ValueError: An unknown ``rotary_placement``, ``normalizer`` or ``decay_placement``, a rotation of less than one
            pair, a division by a kernel that can be 0, or a decay where it cannot stand.

    Source: Su et al. 2021 (arXiv 2104.09864), eq. 19; Qin et al. 2022 (arXiv 2210.10340) for ``"rms"``.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        feature_map: Callable[[int], FeatureMap] = EluPlusOne,
        rotary: Rotation | None = None,
        rotary_placement: Literal["numerator", "before"] = "numerator",
        causal: bool = True,
        chunk_size: int | None = None,
        backend: Backend = "auto",
        normalizer: Normalizer = "features",
        decay: Decay | None = None,
        decay_placement: DecayPlacement = "both",
    ) -> None:
        super().__init__()
        if rotary_placement not in ("numerator", "before"):
            raise ValueError(f"rotary_placement must be 'numerator' or 'before', got {rotary_placement!r}")
        if normalizer not in ("features", "rms", None):
            raise ValueError(f"normalizer must be 'features', 'rms' or None, got {normalizer!r}")
        self.causal, self.rotary_placement = causal, rotary_placement
        self.chunk_size = chunk_size
        self.backend: Backend = backend
        self.normalizer: Normalizer = normalizer
        self.feature_map = feature_map(head_dim).for_heads(num_heads)
        if normalizer == "features" and not self.feature_map.kernel_is_positive:
            raise ValueError(
                f"the kernel of {type(self.feature_map).__name__} can be 0 or negative, and normalizer='features' divides "
                "by its sum; pass normalizer='rms' or None, or give the map a floor above 0 where it takes one"
            )
        check_rotary(rotary, num_heads)
        if decay is not None and not isinstance(decay, Decay):
            raise ValueError(f"decay must be a linrope.Decay or None, got {decay!r}")
        width = self.feature_map.num_features if rotary_placement == "numerator" else head_dim
        self.rotary = None if rotary is None else rotary.for_width(width)
        if decay_placement not in ("numerator", "both"):
            raise ValueError(f"decay_placement must be 'numerator' or 'both', got {decay_placement!r}")
        self.num_heads = num_heads
        self.decay_placement: DecayPlacement = decay_placement
        self.decay = None if decay is None else decay.for_heads(num_heads)
        rotary_decays = self.rotary is not None and self.rotary.rates(width) is not None
        if rotary_decays and rotary_placement == "before":
            raise ValueError(f"{type(rotary).__name__} decays with distance, which is for the numerator alone")
        if not causal and (rotary_decays or decay is not None):
            raise ValueError("a decay with distance is for causal attention, got causal=False")

    def forward(
        self,
        query: Float[Tensor, "b h n d"],
        key: Float[Tensor, "b k s d"],
        value: Float[Tensor, "b k s e"],
        *,
        key_mask: Bool[Tensor, "b s"] | None = None,
        query_positions: Int[Tensor, "*b n"] | None = None,
        key_positions: Int[Tensor, "*b s"] | None = None,
        causal: bool | None = None,
        offsets: Int[Tensor, " p+1"] | None = None,
    ) -> Float[Tensor, "b h n e"]:
        """Attend from queries to keys.

        Args:
            query: Queries.
            key: Keys, of h heads or of k, which divides h: each then serves h/k neighbours.
            value: Values, of as many.
            key_mask: True where a key takes part.
            query_positions: In tokens; 0, 1, … by default.
            key_positions: In tokens; those of the queries if causal, else 0, 1, ….
            causal: For this call, in place of what the module was made with.
            offsets: Of sequences packed into one row; see :func:`linrope.linear_attention`.

        Raises:
            ValueError: Shapes that do not fit; other numbers of keys than of queries where this is causal.
        """
        key, value = share_heads(key, query.shape[1]), share_heads(value, query.shape[1])
        if offsets is not None:
            check_offsets(offsets, query.shape[0], query.shape[2])
            if self.rotary is not None and self.rotary.is_dynamic and self.rotary_placement == "before":
                raise ValueError(
                    f"packed sequences have a length each, and {self.rotary} before the map takes one for the row: "
                    "rotate in the numerator, or give the scaling a seq_len"
                )
            query_positions = packed_positions(offsets) if query_positions is None else query_positions
        causal = self.causal if causal is None else causal
        if key_positions is None and (causal or offsets is not None):
            key_positions = query_positions
        query, key, log_scale = self.map_heads(
            query, key, query_positions, key_positions, key_mask, scaled=self.normalizer is not None
        )
        return linear_attention(
            query,
            key,
            value,
            rotary=self._numerator_rotary,
            causal=causal,
            key_mask=key_mask,
            query_positions=query_positions,
            key_positions=key_positions,
            chunk_size=self.chunk_size,
            backend=self.backend,
            key_log_scale=log_scale,
            normalizer=self.normalizer,
            offsets=offsets,
            log_decay=self._log_decay(query.device),
            decay_placement=self.decay_placement,
        )

    def stream(
        self,
        query: Float[Tensor, "b h n d"],
        key: Float[Tensor, "b k n d"],
        value: Float[Tensor, "b k n e"],
        state: State | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
    ) -> tuple[Float[Tensor, "b h n e"], State]:
        """Attend from the next tokens to themselves and all before them; returns outputs and the new state.

        Args:
            query: Queries of the next tokens, any number of them.
            key: Their keys.
            value: Their values.
            state: What the call for the tokens before returned; None at the start.
            key_mask: True where a key takes part.
            positions: In tokens; by default they go on from ``state.position``.

        Raises:
            ValueError: This is not causal, its rotation depends on the length of the text, or shapes do not fit.
        """
        if not self.causal:
            raise ValueError("only a causal layer streams; this one was made with causal=False")
        check_streams(self.rotary)
        if positions is None:
            b, _, n, _ = query.shape
            positions = next_positions(b, n, None if state is None else state.position, query.device)
        key, value = share_heads(key, query.shape[1]), share_heads(value, query.shape[1])
        query, key, log_scale = self.map_heads(query, key, positions, positions, scaled=self.normalizer is not None)
        return stream_linear_attention(
            query,
            key,
            value,
            state,
            rotary=self._numerator_rotary,
            key_mask=key_mask,
            query_positions=positions,
            chunk_size=self.chunk_size,
            backend=self.backend,
            key_log_scale=log_scale,
            normalizer=self.normalizer,
            log_decay=self._log_decay(query.device),
            decay_placement=self.decay_placement,
        )

    def _log_decay(self, device: torch.device) -> Float[Tensor, " h"] | None:
        return None if self.decay is None else self.decay(self.num_heads, device)

    @property
    def _numerator_rotary(self) -> Rotation | None:
        return self.rotary if self.rotary_placement == "numerator" else None

    def map_heads(
        self,
        query: Tensor,
        key: Tensor,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        *,
        scaled: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Map queries and keys ``b h n d``; returns both and the log-scales that ``scaled`` keys lack.

        A rotation before the map is done here, one in the numerator is not. Scaled features are for what
        divides a query's factor out again.
        """
        if self.rotary is not None and self.rotary_placement == "before":
            query, key = self.rotary.before(query, key, query_positions, key_positions, key_mask)
        feature_map = self.feature_map
        of_query, of_key = (
            (torch.arange(x.shape[2], device=x.device) if at is None else at,) if feature_map.uses_positions else ()
            for x, at in ((query, query_positions), (key, key_positions))
        )
        if not scaled:
            return feature_map.map_query(query, *of_query), feature_map.map_key(key, *of_key), None
        return feature_map.scaled_query(query, *of_query), *feature_map.scaled_key(key, *of_key)

    def extra_repr(self) -> str:  # noqa: D102
        return f"causal={self.causal}, rotary_placement={self.rotary_placement!r}, normalizer={self.normalizer!r}"
