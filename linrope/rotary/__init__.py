"""Rotary positions: rotations, and how their frequencies scale."""

from linrope.rotary.axial import AxialRotary
from linrope.rotary.learned import LearnedRotary
from linrope.rotary.rotary import Rotary, rotate
from linrope.rotary.rotation import Rotation, check_rotary, check_streams, rotated_width
from linrope.rotary.scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    NTKScaling,
    Scaling,
    YaRN,
    inv_freq,
)
from linrope.rotary.turning import Pairing, half_order, turn_pairs
from linrope.rotary.xpos import XPos

__all__ = [
    "AxialRotary",
    "DynamicNTKScaling",
    "LearnedRotary",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPE",
    "NTKScaling",
    "Pairing",
    "Rotary",
    "Rotation",
    "Scaling",
    "XPos",
    "YaRN",
    "check_rotary",
    "check_streams",
    "half_order",
    "inv_freq",
    "rotate",
    "rotated_width",
    "turn_pairs",
]
