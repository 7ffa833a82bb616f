"""The definition of packed_vit3_block, in PyTorch's operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.depthwise_conv2d import contract as conv2d_contract
from vision_ttt.ops.depthwise_conv2d.definition import depthwise_conv2d_definition
from vision_ttt.ops.packed.linear import packed_linear_definition
from vision_ttt.ops.vit3_ttt import depthwise, depthwise_step, gated_unit, gated_unit_step


def packed_vit3_block_definition(
    y: Tensor, parameters: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> Tensor:
    """See :func:`vision_ttt.ops.packed.packed_vit3_block`. It rounds where the kernels round."""
    if not len(y):  # the inner convolution would see no channel
        return y.clone()
    conv2d, conv2d_bias, *norms, modulation = parameters[:7]
    qkv, qkv_bias, units, kernels, proj, proj_bias = parameters[7:13]
    fc1, fc1_bias, fc2, fc2_bias, mlp_conv, mlp_conv_bias, rotations = parameters[13:]
    height, width, heads, hidden, tanh_gelu = ints
    loss_scale, *eps = floats
    dim, dtype, grid = y.shape[-1], qkv.dtype, (height, width)
    d = dim // heads
    gelu = {"approximate": "tanh" if tanh_gelu else "none"}

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weight = weight.t().reshape(-1, 1, 3, 3)
        return x + depthwise_conv2d_definition(conv2d_contract.Inputs(x, weight, *grid)) + bias

    def norm(x: Tensor, branch: int) -> Tensor:
        if not modulation.numel():
            return F.layer_norm(x, (dim,), *norms[2 * branch : 2 * branch + 2], eps[branch])
        shift, scale = modulation[:, 3 * branch, None], modulation[:, 3 * branch + 1, None]
        return F.layer_norm(x, (dim,), None, None, eps[branch]) * scale + shift

    def gate(x: Tensor, branch: int) -> Tensor:
        return modulation[:, 3 * branch + 2, None] * x if modulation.numel() else x

    def linear(x: Tensor, weight: Tensor, bias: Tensor, columns: int) -> Tensor:
        return packed_linear_definition(x, weight, bias if bias.numel() else None, columns)

    y = convolve(y, conv2d, conv2d_bias)
    views = linear(norm(y, 0), qkv, qkv_bias, 3 * (dim + d))
    q, k, v, q2, k2, v2 = views.split((dim, dim, dim, d, d, d), dim=-1)
    if rotations.numel():  # cos and sin of a pair of channels as a complex number
        turns = torch.view_as_complex(rotations.contiguous())
        pairs = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
        q, k = (torch.view_as_real(pair * turns).flatten(-2) for pair in pairs)
    q, k, v = (view.unflatten(-1, (heads, d)) for view in (q.to(dtype).to(y.dtype), k, v))
    w2, w1 = units.chunk(2, dim=-1)
    w1, w2 = gated_unit_step(k, v, w1, w2, loss_scale=loss_scale)
    w3 = depthwise_step(k2, v2, kernels.t().reshape(d, 1, 3, 3), grid, loss_scale=loss_scale)
    o = torch.cat((gated_unit(q, w1, w2).flatten(2), depthwise(q2, w3, grid)), dim=-1)
    y = y + gate(linear(o, proj, proj_bias, dim), 0)
    h = F.gelu(linear(norm(y, 1), fc1, fc1_bias, hidden), **gelu)
    if mlp_conv.numel():
        h = F.gelu(convolve(h.to(dtype).to(y.dtype), mlp_conv, mlp_conv_bias), **gelu)
    return y + gate(linear(h, fc2, fc2_bias, dim), 1)
