"""Stateless sequence ops, one folder per op.

An op checks its tensors, including those of a state, before a kernel or PyTorch reads them. Each
tensor must be strided, have a floating-point dtype and a shape that fits the other tensors, and be
on the device of the first tensor. Its storage must not have been freed: FSDP frees the storages of
parameters between the passes of their modules. The backward pass checks the storages again. A
violation raises a ``TypeError`` or a ``ValueError`` that names the argument. The op does not check
whether a storage that was resized still holds the whole tensor.
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
