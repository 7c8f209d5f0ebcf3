"""Attention layers: thin owners of parameters around the pure functions."""

from linrope.layers.kernel import KernelAttention
from linrope.layers.linear import LinearAttention
from linrope.layers.short_conv import ShortConv, ShortConvState
from linrope.layers.softmax import KeyValueState, SoftmaxAttention

__all__ = ["KernelAttention", "KeyValueState", "LinearAttention", "ShortConv", "ShortConvState", "SoftmaxAttention"]
