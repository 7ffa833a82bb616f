"""The table of all ops."""

from __future__ import annotations

from vision_ttt.ops._op import Op
from vision_ttt.ops.deformable_attention.op import OP as DEFORMABLE_ATTENTION
from vision_ttt.ops.depthwise_conv2d.op import OP as DEPTHWISE_CONV2D
from vision_ttt.ops.directional_conv1d.op import OP as DIRECTIONAL_CONV1D
from vision_ttt.ops.fused_mamba.op import OP as FUSED_MAMBA
from vision_ttt.ops.fused_ttt_linear.op import OP as FUSED_TTT_LINEAR
from vision_ttt.ops.gated_norm.op import OP as GATED_NORM
from vision_ttt.ops.linear.op import OP as LINEAR
from vision_ttt.ops.selective_scan.op import OP as SELECTIVE_SCAN
from vision_ttt.ops.swiglu.op import OP as SWIGLU
from vision_ttt.ops.swiglu_mlp.op import OP as SWIGLU_MLP
from vision_ttt.ops.swiglu_ttt.op import OP as SWIGLU_TTT
from vision_ttt.ops.ttt_linear.op import OP as TTT_LINEAR
from vision_ttt.ops.ttt_mlp.op import OP as TTT_MLP
from vision_ttt.ops.vit3_ttt.op import OP as DEPTHWISE_CORRELATION

TABLE: dict[str, Op] = {  # public name → op
    op.name: op
    for op in (
        DEFORMABLE_ATTENTION,
        DEPTHWISE_CONV2D,
        DEPTHWISE_CORRELATION,
        DIRECTIONAL_CONV1D,
        FUSED_MAMBA,
        FUSED_TTT_LINEAR,
        GATED_NORM,
        LINEAR,
        SELECTIVE_SCAN,
        SWIGLU,
        SWIGLU_MLP,
        SWIGLU_TTT,
        TTT_LINEAR,
        TTT_MLP,
    )
}
