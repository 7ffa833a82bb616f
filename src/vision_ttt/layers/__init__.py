"""Layers that can be used alone, in any model."""

from vision_ttt.layers.attention_inner import SwiGLUInner, TTTLinearInner, ViT3Inner
from vision_ttt.layers.depthwise_conv2d import DepthwiseConv2d
from vision_ttt.layers.diffusion_conditioning import LabelEmbedding, TimestepEmbedding
from vision_ttt.layers.directional_conv1d import DirectionalConv1d
from vision_ttt.layers.dit3 import AdaptiveNorm, DiT3Block, DiT3Head
from vision_ttt.layers.extra_tokens import ExtraTokens
from vision_ttt.layers.functional_learner import FunctionalLearner
from vision_ttt.layers.gated_norm import GatedNorm, TanhGatedNorm
from vision_ttt.layers.inner_learner import InnerLearner, LinearLearner, MLPLearner
from vision_ttt.layers.linear_attention import LinearAttention
from vision_ttt.layers.mamba import BidirectionalMamba, MambaBlock
from vision_ttt.layers.mamba_mixer import Mamba, MambaState
from vision_ttt.layers.mlp import ConvMlp, Mlp
from vision_ttt.layers.residual_conv2d import ResidualConv2d
from vision_ttt.layers.rotary1d import MiniBatchRotary
from vision_ttt.layers.swiglu import SwiGLU
from vision_ttt.layers.ttt_attention import TTTAttention
from vision_ttt.layers.ttt_layer import TTTLayer, TTTLayerState
from vision_ttt.layers.ttt_linear import TTTLinear
from vision_ttt.layers.ttt_mlp import TTTMLP, warm_up_inner_rates
from vision_ttt.layers.vit3 import ViT3Block
from vision_ttt.layers.vit3_ttt import ViT3TTT
from vision_ttt.layers.vittt import VitttBlock, VitttMixer

__all__ = [
    "SwiGLUInner",
    "TTTAttention",
    "TTTLayer",
    "TTTLayerState",
    "TTTLinear",
    "TTTLinearInner",
    "TTTMLP",
    "VitttBlock",
    "VitttMixer",
    "InnerLearner",
    "LinearLearner",
    "LinearAttention",
    "MLPLearner",
    "MiniBatchRotary",
    "FunctionalLearner",
    "warm_up_inner_rates",
    "DepthwiseConv2d",
    "DirectionalConv1d",
    "ExtraTokens",
    "GatedNorm",
    "TanhGatedNorm",
    "SwiGLU",
    "ViT3Block",
    "ViT3Inner",
    "ViT3TTT",
    "BidirectionalMamba",
    "Mamba",
    "MambaState",
    "MambaBlock",
    "DiT3Block",
    "DiT3Head",
    "AdaptiveNorm",
    "LabelEmbedding",
    "TimestepEmbedding",
    "ConvMlp",
    "Mlp",
    "ResidualConv2d",
]
