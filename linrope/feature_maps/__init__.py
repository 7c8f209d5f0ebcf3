"""Kernel feature maps φ."""

from linrope.feature_maps.base import FeatureMap, redraw_feature_maps
from linrope.feature_maps.elementwise import EluPlusOne
from linrope.feature_maps.favor import FavorPlus

__all__ = ["EluPlusOne", "FavorPlus", "FeatureMap", "redraw_feature_maps"]
