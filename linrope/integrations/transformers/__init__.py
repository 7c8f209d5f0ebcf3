"""Linear attention in models of Hugging Face's transformers.

Importing this registers the attention ``"linrope"``, elu + 1, for every model that dispatches through transformers'
AttentionInterface: ``model.set_attn_implementation("linrope")`` then computes with it, until it is set back. Llama and
others that rotate queries and keys do so before they are handed over: that is placement ``"before"``.
:func:`replace_attention` gives each layer a feature map of its own, of any kind, and can take the rotation over;
:func:`state_cache` lets a model generate in memory that does not grow.
"""

from linrope.integrations.transformers.cache import state_cache
from linrope.integrations.transformers.interface import linear_attention_forward, linear_attention_mask
from linrope.integrations.transformers.replacement import RoFormerAttention, replace_attention

__all__ = [
    "RoFormerAttention",
    "linear_attention_forward",
    "linear_attention_mask",
    "replace_attention",
    "state_cache",
]
