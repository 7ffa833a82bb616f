"""The public op: what it computes, and the way to it."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops._backend import exporting_onnx, is_transformed
from vision_ttt.ops._overriding import overridable
from vision_ttt.ops.swiglu_mlp.contract import PUBLIC_CONTRACT
from vision_ttt.ops.swiglu_mlp.definition import swiglu_mlp_definition
from vision_ttt.ops.swiglu_mlp.op import swiglu_mlp_op


@overridable
def swiglu_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(SiLU(a) ⊙ b) W_downᵀ with [a, b] = x W_upᵀ, the MLP of Vision-TTT's Eq. 9.

    Nothing but its arguments is kept for the backward pass, which computes the hidden layer again:
    of a Vittt block's tensors that is the largest by far. On a CPU some tokens are worked on after
    the others, so that what lies between the products stays near the cores.

    Args:
        x: [..., D].
        up: [2 H, D], gate and value.
        down: [E, H].

    Returns:
        [..., E], differentiable in every tensor.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the shapes do not fit each other.
    """
    PUBLIC_CONTRACT.check({"x": x, "up": up, "down": down})
    kind = "cpu" if x.device.type == "meta" else x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, up, down = (t if t.dtype == torch.float64 else t.to(dtype) for t in (x, up, down))
    if is_transformed() or exporting_onnx():
        return swiglu_mlp_definition(x, up, down)
    return swiglu_mlp_op(x, up, down)
