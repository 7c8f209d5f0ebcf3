"""A cache for transformers' generation that holds sums in place of keys: constant in size."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from linrope.attention import State


class NewKeys(NamedTuple):
    """Keys of the next tokens alone, and the layer whose state stands for those before."""

    keys: Float[Tensor, "b k n d"]
    layer: StateLayer


class StateLayer(CacheLayerMixin):
    """What one attention layer remembers: the :class:`linrope.State` of the tokens it has seen.

    The attention function reads and renews ``state``; ``update`` hands it this layer along with the new keys.
    """

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.num_tokens = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is made before the first keys."""

    def update(  # type: ignore[override]
        self, key_states: Float[Tensor, "b k n d"], value_states: Float[Tensor, "b k n e"], *_: Any, **__: Any
    ) -> tuple[NewKeys, Float[Tensor, "b k n e"]]:
        """Count the new tokens, and keep none of them."""
        self.num_tokens += key_states.shape[-2]
        return NewKeys(key_states, self), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are of the new tokens: their number, and that of the tokens before."""
        return query_length, self.num_tokens

    def get_seq_length(self) -> int:
        """Tokens seen, masked ones too."""
        return self.num_tokens

    def get_max_length(self) -> int:
        """-1, transformers' word for: any number."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.num_tokens = None, 0

    def reorder_cache(self, beam_idx: Int[Tensor, " b"]) -> None:
        """Let row i go on from what row ``beam_idx[i]`` has seen."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " b"]) -> None:
        """Keep these rows, in this order."""
        if self.state is not None:
            self.state = State(*(x.index_select(0, indices.to(x.device)) for x in self.state))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each row stand for as many neighbours."""
        if self.state is not None:
            self.state = State(*(x.repeat_interleave(repeats, dim=0) for x in self.state))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: what was summed cannot be taken out.

        Raises:
            ValueError: There is something to remove.
        """
        if tokens_to_remove:
            raise ValueError(f"sums forget no token: a state_cache cannot be cropped, by {tokens_to_remove}")


def state_cache() -> Cache:
    """Return an empty cache that holds a :class:`linrope.State` for each layer, to be given to ``generate`` or a model.

    Its size does not grow with the tokens seen. It goes with causal self-attention of the implementation ``"linrope"``
    alone, and cannot take tokens back, as assisted generation would. For a decoder that also attends to an encoder put it
    into an ``EncoderDecoderCache``, with a ``DynamicCache`` for the encoder's keys.
    """
    return Cache(layer_class_to_replicate=StateLayer)
