"""Linear attention with rotary positions."""

from linrope.attention import State, linear_attention, stream_linear_attention
from linrope.feature_maps import EluPlusOne, FavorPlus, FeatureMap, redraw_feature_maps
from linrope.layers import KeyValueState, LinearAttention, SoftmaxAttention
from linrope.models import ByteTransformer
from linrope.rotary import Rotary, rotate

__all__ = [
    "ByteTransformer",
    "EluPlusOne",
    "FavorPlus",
    "FeatureMap",
    "KeyValueState",
    "LinearAttention",
    "Rotary",
    "SoftmaxAttention",
    "State",
    "linear_attention",
    "redraw_feature_maps",
    "rotate",
    "stream_linear_attention",
]
