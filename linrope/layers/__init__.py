"""Attention layers: thin owners of parameters around the pure functions."""

from linrope.layers.kernel import KernelAttention
from linrope.layers.linear import LinearAttention
from linrope.layers.position_bias import ALiBi, PositionBias, T5Bias
from linrope.layers.short_conv import ShortConv, ShortConvState
from linrope.layers.softmax import KeyValueState, PositionedKeyValueState, SoftmaxAttention

__all__ = [
    "ALiBi",
    "KernelAttention",
    "KeyValueState",
    "LinearAttention",
    "PositionBias",
    "PositionedKeyValueState",
    "ShortConv",
    "ShortConvState",
    "SoftmaxAttention",
    "T5Bias",
]
