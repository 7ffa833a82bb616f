"""The definition of normed_swiglu_mlp, in PyTorch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops.normed_swiglu_mlp.contract import Inputs
from vision_ttt.ops.swiglu_mlp import contract as mlp
from vision_ttt.ops.swiglu_mlp import swiglu_mlp
from vision_ttt.ops.swiglu_mlp.definition import swiglu_mlp_definition


def normed_swiglu_mlp_definition(inputs: Inputs) -> Tensor:
    """See :func:`vision_ttt.ops.normed_swiglu_mlp`."""
    x, _, _, up, down, residual, _ = inputs
    branch = swiglu_mlp_definition(mlp.Inputs(_normed(inputs), up, down))
    return x + branch if residual else branch


def normed_swiglu_mlp_composition(inputs: Inputs) -> Tensor:
    """The same by the op swiglu_mlp, which selects its own backend."""
    x, _, _, up, down, residual, _ = inputs
    branch = swiglu_mlp(_normed(inputs), up, down)
    return x + branch if residual else branch


def _normed(inputs: Inputs) -> Tensor:
    return F.layer_norm(
        inputs.x, inputs.x.shape[-1:], inputs.norm_weight, inputs.norm_bias, inputs.eps
    )
