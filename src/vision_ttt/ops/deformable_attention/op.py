"""The public function of deformable_attention and its registration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.deformable_attention import cpu, dual
from vision_ttt.ops.deformable_attention.contract import BACKWARD_CONTRACT, CONTRACT, Inputs
from vision_ttt.ops.deformable_attention.definition import deformable_attention_definition


def _fake(inputs: Inputs) -> Tensor:
    value, locations, _, _ = inputs
    cells = sum(h * w for h, w in inputs.levels())
    torch._check(value.shape[1] == cells, lambda: "the tokens do not fill the levels")
    return value.new_empty(value.shape[0], locations.shape[1], value.shape[2] * value.shape[3])


def _flops(shapes: Inputs) -> int:
    """A multiply-add per point, cell around it and channel."""
    return 2 * math.prod(shapes.weights) * 4 * shapes.value[-1]


_TENSORS = "Tensor value, Tensor locations, Tensor weights, SymInt[] spatial_shapes"
OP = Op(
    "deformable_attention",
    Inputs,
    CONTRACT,
    deformable_attention_definition,
    {"cpu": cpu.BACKEND, "dual": dual.BACKEND},
    _fake,
    schema=f"({_TENSORS}) -> Tensor",
    backward_schema=f"(Tensor grad, {_TENSORS}) "
    "-> (Tensor dvalue, Tensor dlocations, Tensor dweights)",
    backward_contract=BACKWARD_CONTRACT,
    autocast=("value",),
    flops=_flops,
    backward_flops=lambda shapes: 2 * _flops(shapes),  # gradients of the cells, and of the points
)


@overridable
def deformable_attention(
    value: Tensor,
    locations: Tensor,
    weights: Tensor,
    spatial_shapes: Sequence[tuple[int, int]],
) -> Tensor:
    """Attend to a few points of maps of several sizes (Deformable DETR, Zhu et al. 2021, Eq. 3).

    ``out[q, h] = Σ_l Σ_p weights[q, h, l, p] · value_l,h(x w_l - ½, y h_l - ½)``, where (x, y) is
    ``locations[q, h, l, p]`` and value_l,h(…, …) interpolates head h of level l bilinearly between
    the centres of its cells, with zeros outside. It equals ``grid_sample`` with
    ``align_corners=False``.

    The kernels support heads of a multiple of 16 channels in float32 and bfloat16. They accumulate
    in float32, and copy locations and weights unless they are contiguous float32.

    Args:
        value: [B, S, H, d], the cells of all levels, level by level, each row by row.
        locations: [B, Q, H, L, P, 2], (x, y) as fractions of a level's width and height: (0, 0) is
            the upper left corner of its first cell. Points outside 0 … 1, infinite ones too, are
            accepted and count as zeros. A NaN makes its head's output NaN.
        weights: [B, Q, H, L, P].
        spatial_shapes: (h, w) of each of the L levels, with S = Σ h · w.

    Returns:
        [B, Q, H · d] in the dtype of value, differentiable in value, locations and weights.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: the tensors and the spatial shapes do not fit, or the requested backend does not
            support the call.
    """
    for pair in spatial_shapes:
        if not (
            isinstance(pair, (tuple, list))
            and len(pair) == 2
            and all(isinstance(size, (int, torch.SymInt)) for size in pair)
        ):
            raise TypeError(
                "deformable_attention: spatial_shapes must be pairs (h, w) of ints, "
                f"got {spatial_shapes!r}"
            )
    sizes = tuple(size for pair in spatial_shapes for size in pair)
    return OP(Inputs(value, locations, weights, sizes))
