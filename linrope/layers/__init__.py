"""Attention layers: thin owners of the projections around the pure functions."""

from linrope.layers.linear import LinearAttention
from linrope.layers.softmax import KeyValueState, SoftmaxAttention

__all__ = ["KeyValueState", "LinearAttention", "SoftmaxAttention"]
