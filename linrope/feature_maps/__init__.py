"""Feature maps φ, which decide what kernel linear attention attends with."""

from linrope.feature_maps.base import FeatureMap, redraw_feature_maps
from linrope.feature_maps.elementwise import EluPlusOne, ReLU, Sigmoid, Softplus, SquaredReLU
from linrope.feature_maps.expansions import DPFP, CosFormer, OnePlusCosine, Taylor
from linrope.feature_maps.exponential import Exp, SoftmaxExp
from linrope.feature_maps.favor import FavorHyperbolic, FavorPlus, FavorPlusPlus, FavorReLU, RandomFourier
from linrope.feature_maps.learned import T2R, Hedgehog, LearnedFavor, ReBased
from linrope.feature_maps.logarithmic import LogFeatureMap

__all__ = [
    "DPFP",
    "T2R",
    "CosFormer",
    "EluPlusOne",
    "Exp",
    "FavorHyperbolic",
    "FavorPlus",
    "FavorPlusPlus",
    "FavorReLU",
    "FeatureMap",
    "Hedgehog",
    "LearnedFavor",
    "LogFeatureMap",
    "OnePlusCosine",
    "RandomFourier",
    "ReBased",
    "ReLU",
    "Sigmoid",
    "SoftmaxExp",
    "Softplus",
    "SquaredReLU",
    "Taylor",
    "redraw_feature_maps",
]
