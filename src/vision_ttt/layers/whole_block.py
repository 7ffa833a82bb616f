"""When a Vittt block runs as one op, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from vision_ttt.layers.depthwise_conv2d import DepthwiseConv2d
from vision_ttt.layers.directional_conv1d import DirectionalConv1d
from vision_ttt.layers.gated_norm import GatedNorm
from vision_ttt.layers.linear_learner import LinearLearner
from vision_ttt.layers.overwriting import may_overwrite
from vision_ttt.layers.plain_calls import are_plain
from vision_ttt.layers.swiglu import SwiGLU
from vision_ttt.layers.ttt_linear import TTTLinear
from vision_ttt.ops._native import kernels_serve
from vision_ttt.ops.vittt_block import Parameters, fits, vittt_block

if TYPE_CHECKING:
    from vision_ttt.layers.vittt import VitttBlock


def as_one_op(
    block: VitttBlock, y: Tensor, grid: tuple[int, int], extra: Sequence[int]
) -> Tensor | None:
    """The block's output for tokens y [B, T, D], or None where its modules have to be called.

    One op serves inference in float32 on a CPU of the published parts, as long as nobody has
    replaced one of them or listens to it: LoRA, quantisation and hooks get what they expect.
    """
    if extra or not may_overwrite():
        return None
    if type(y) is not Tensor or not kernels_serve(y) or y.ndim != 3:
        return None
    _, length, dim = y.shape
    if length != grid[0] * grid[1]:
        return None
    # A module's parts by attribute cost ten times as much as from its dictionary, and this is all
    # the time there is between two products of a small image.
    parts = block._modules
    mixer, mlp = parts["mixer"], parts.get("mlp")
    ttt = mixer._modules.get("ttt")
    if not are_plain(((ttt, TTTLinear), (mlp, SwiGLU))):
        return None
    mixer_parts, ttt_parts, mlp_parts = mixer._modules, ttt._modules, mlp._modules
    conv2d, norm, mlp_norm = mixer_parts.get("conv2d"), mixer_parts["norm"], parts["norm"]
    conv_q, conv_k, learner = ttt_parts["conv_q"], ttt_parts["conv_k"], ttt_parts["learner"]
    merge, rate_proj = ttt_parts["merge"], ttt_parts["rate_proj"]
    projections = ttt_parts["in_proj"], ttt_parts["out_proj"], mlp_parts["fc1"], mlp_parts["fc2"]
    drop_paths = mixer_parts["drop_path"], parts["drop_path"]
    kinds = (
        (learner, LinearLearner),
        (conv2d, DepthwiseConv2d),
        (merge, GatedNorm),
        (conv_q, DirectionalConv1d),
        (conv_k, DirectionalConv1d),
        (norm, nn.LayerNorm),
        (mlp_norm, nn.LayerNorm),
        (rate_proj, nn.Linear),
        *((projection, nn.Linear) for projection in projections),
        *((x, DropPath if type(x) is DropPath else nn.Identity) for x in drop_paths),
    )
    if not (
        are_plain(kinds)
        and all(projection._parameters["bias"] is None for projection in projections)
        and not any(type(x) is DropPath and x.training for x in drop_paths)
        and conv_q.weight.shape == conv_k.weight.shape  # other taps are the modules' business
        and conv_q.reverse_channels == conv_k.reverse_channels
        and conv_q.reverse_channels == learner.reverse_heads * ttt.head_dim
        and fits(ttt.head_dim, dim, learner.mini_batch_size, projections[3].in_features)
    ):
        return None
    in_proj, out_proj, fc1, fc2 = (projection._parameters["weight"] for projection in projections)
    inner = learner._parameters
    parameters = Parameters(
        conv2d._parameters["weight"],
        *_weight_and_bias(norm),
        in_proj,
        *_weight_and_bias(rate_proj),
        *_weight_and_bias(conv_q),
        *_weight_and_bias(conv_k),
        *learner.state(),
        inner["norm_weight"],
        inner["norm_bias"],
        inner["position_offset"],
        *_weight_and_bias(merge),
        out_proj,
        *_weight_and_bias(mlp_norm),
        fc1,
        fc2,
    )
    for x in parameters:
        if type(x) not in _TENSORS or x.dtype is not torch.float32 or not x.is_cpu:
            return None
    return vittt_block(
        y,
        parameters,
        grid=grid,
        q_columns=ttt.widths["q"],
        gate_columns=ttt.widths["gate"],
        base_learning_rate=ttt.base_learning_rate,
        norm_eps=norm.eps,
        inner_eps=learner.eps,
        post_eps=merge.eps,
        mlp_norm_eps=mlp_norm.eps,
    )


_TENSORS = (nn.Parameter, Tensor)


def _weight_and_bias(module: nn.Module) -> tuple[Tensor, Tensor]:
    parameters = module._parameters
    return parameters["weight"], parameters["bias"]
