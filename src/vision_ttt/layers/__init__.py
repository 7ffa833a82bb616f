"""Layers that can be used alone, in anybody's model."""

from vision_ttt.layers.depthwise_conv2d import DepthwiseConv2d
from vision_ttt.layers.directional_conv1d import DirectionalConv1d
from vision_ttt.layers.extra_tokens import ExtraTokens
from vision_ttt.layers.gated_norm import GatedNorm
from vision_ttt.layers.linear_learner import LinearLearner
from vision_ttt.layers.swiglu import SwiGLU
from vision_ttt.layers.ttt_linear import TTTLinear
from vision_ttt.layers.vittt import VitttBlock, VitttMixer

__all__ = [
    "TTTLinear",
    "VitttBlock",
    "VitttMixer",
    "LinearLearner",
    "DepthwiseConv2d",
    "DirectionalConv1d",
    "ExtraTokens",
    "GatedNorm",
    "SwiGLU",
]
