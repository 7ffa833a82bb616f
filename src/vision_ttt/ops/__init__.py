"""Stateless sequence ops, one folder per op.

An op checks each of its tensors, those of a state included, before a kernel or PyTorch reads them:
it is a strided tensor of a floating dtype, its shape fits the others', it is on the first one's
device, and its storage has not been freed (as FSDP frees those of parameters between their
modules' passes; checked again before the backward pass). Anything else raises a ``TypeError`` or a
``ValueError`` that names the argument. That a storage that was made smaller still holds the whole
tensor is not checked.
"""

from vision_ttt.ops._backend import use_backend
from vision_ttt.ops.deformable_attention import deformable_attention
from vision_ttt.ops.depthwise_conv2d import depthwise_conv2d, residual_depthwise_conv2d
from vision_ttt.ops.directional_conv1d import directional_conv1d
from vision_ttt.ops.fused_mamba import fused_mamba
from vision_ttt.ops.fused_ttt_linear import fused_ttt_linear
from vision_ttt.ops.gated_norm import gated_norm
from vision_ttt.ops.linear import linear
from vision_ttt.ops.selective_scan import selective_scan
from vision_ttt.ops.swiglu import swiglu
from vision_ttt.ops.swiglu_mlp import swiglu_mlp
from vision_ttt.ops.swiglu_ttt import swiglu_ttt
from vision_ttt.ops.ttt_linear import LinearState, ttt_linear
from vision_ttt.ops.ttt_mlp import MLPState, ttt_mlp

__all__ = [
    "LinearState",
    "MLPState",
    "deformable_attention",
    "depthwise_conv2d",
    "directional_conv1d",
    "fused_mamba",
    "fused_ttt_linear",
    "gated_norm",
    "linear",
    "residual_depthwise_conv2d",
    "selective_scan",
    "swiglu",
    "swiglu_mlp",
    "swiglu_ttt",
    "ttt_linear",
    "ttt_mlp",
    "use_backend",
]
