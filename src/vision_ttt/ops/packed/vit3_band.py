"""The op ``vision_ttt::packed_vit3_band``: rows of a picture through one sweep of a ViT³ block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_ttt.ops._contract import Whole, check_number
from vision_ttt.ops._op import Backend, Op
from vision_ttt.ops.packed.block import GRID, Block, run_op
from vision_ttt.ops.packed.linear import linear
from vision_ttt.ops.packed.vit3_block import (
    FLOATS,
    PARAMETERS,
    RANGES,
    Vit3BlockSizes,
    Vit3BlockStructure,
    derive,
    refuse,
)
from vision_ttt.ops.packed.weights import call
from vision_ttt.ops.vit3_ttt import (
    depthwise,
    depthwise_after,
    depthwise_ascent,
    gated_unit,
    gated_unit_after,
    gated_unit_ascent,
)


def _derive(op: str, s: Mapping[str, int]) -> dict[str, int]:
    if s["convolved"] or s["modulated"]:
        raise ValueError(f"{op}: the MLP must not convolve, nor the block be modulated")
    sizes = derive(op, s)
    return {**sizes, "numbers": s["heads"] * 2 * sizes["d"] ** 2 + 9 * sizes["d"]}


def _check_call(values: Mapping[str, Any], s: Mapping[str, int]) -> None:
    op, y, sums = "packed_vit3_band", values["y"], values["sums"]
    height, width, above, below, *_ = values["ints"]
    if y.shape[0] != 1 or y.shape[1] != height * width:
        raise ValueError(f"{op}: y must be [1, {height} x {width}, D], got {list(y.shape)}")
    if above + below >= height:
        raise ValueError(f"{op}: of {height} rows {above} and {below} are around the band's")
    if sums is not None and len(sums) != s["numbers"]:
        raise ValueError(f"{op}: sums must have {s['numbers']} numbers, got {len(sums)}")


BLOCK = Block(
    "packed_vit3_band",
    Vit3BlockStructure,
    PARAMETERS,
    Vit3BlockSizes,
    ranges={**RANGES, **dict.fromkeys(("above", "below"), Whole(0, 2))},
    floats=FLOATS,
    derive=_derive,
    refusal=refuse,
    leading=(*GRID, "above", "below", "total"),
    further=_check_call,
    kernel="packed_vit3_block",
)


class Inputs(NamedTuple):
    """The op's arguments; ``ints`` begin with the numbers of the call, ``floats`` are BLOCK's."""

    y: Tensor
    weights: Tensor
    sums: Tensor | None
    ints: Sequence[int]
    floats: Sequence[float]


def _result(inputs: Inputs) -> Tensor:
    """Unwritten memory for the result."""
    y, (height, width, above, below, _, heads, *_) = inputs.y, inputs.ints
    if inputs.sums is not None:
        return y.new_empty((1, (height - above - below) * width, y.shape[-1]))
    d = y.shape[-1] // heads
    return y.new_empty(2 * heads * d * d + 9 * d)


def packed_vit3_band_definition(inputs: Inputs) -> Tensor:
    """See :func:`packed_vit3_band`. It rounds where the kernels round."""
    y, weights, sums, (height, width, above, below, total, *sizes), floats = inputs
    loss_scale, *eps = floats
    s, dim = Vit3BlockSizes(*sizes), y.shape[-1]
    p = BLOCK.split(weights, dim, s, y.dtype)
    d, dtype = dim // s.heads, p["qkv"].dtype

    def norm(x: Tensor, name: str, eps: float) -> Tensor:
        return F.layer_norm(x, (dim,), p[f"{name}.weight"], p[f"{name}.bias"], eps)

    weight = p["conv2d"].t().reshape(dim, 1, 3, 3)
    y = y + run_op("depthwise_conv2d", y, weight, height, width) + p["conv2d_bias"]
    # Keep the band's rows and one row on either side. For rows further out, the first convolution
    # lacks a neighbouring row.
    rows = slice((above - min(above, 1)) * width, (height - below + min(below, 1)) * width)
    lead, count = min(above, 1) * width, (height - above - below) * width
    grid = min(above, 1) + height - above - below + min(below, 1), width
    y = y[:, rows]
    own = slice(lead, lead + count)
    views = linear(norm(y, "norm1", eps[0]), p, "qkv")
    q, k, v, q2, k2, v2 = views.split((dim, dim, dim, d, d, d), dim=-1)
    q, k, v = (x[:, own].unflatten(-1, (s.heads, d)) for x in (q, k, v))
    w2, w1 = p["units"].chunk(2, dim=-1)
    if sums is None:
        after = grid[0] * width - lead - count
        # v is 0 around the band: the bands that own these rows count them.
        v2 = F.pad(v2[:, own], (0, 0, lead, after))
        kernels = depthwise_ascent(k2.contiguous(), v2, grid, 3)
        units = gated_unit_ascent(k, v, w1, w2)
        return torch.cat((units.flatten(), kernels.view(d, 9).t().flatten()))
    units, kernels = sums.to(y.dtype).split((2 * s.heads * d * d, 9 * d))
    units, kernels = units.view(1, s.heads, d, 2 * d), kernels.view(9, d).t().reshape(1, d, 3, 3)
    w1, w2 = gated_unit_after(units, total, w1, w2, loss_scale=loss_scale)
    w3 = p["kernels"].t().reshape(d, 1, 3, 3)
    w3 = depthwise_after(kernels, total, w3, loss_scale=loss_scale)
    o = gated_unit(q.to(dtype).to(y.dtype), w1, w2).flatten(2)
    o = torch.cat((o, depthwise(q2.contiguous(), w3, grid)[:, own]), dim=-1)
    y = y[:, own] + linear(o, p, "proj")
    hidden = linear(norm(y, "norm2", eps[1]), p, "fc1")
    return y + linear(F.gelu(hidden, approximate="tanh" if s.tanh_gelu else "none"), p, "fc2")


def _forward(inputs: Inputs) -> Tensor:
    y, weights, sums, ints, floats = inputs
    out = _result(inputs)
    if sums is not None:
        sums = sums.contiguous()
        return BLOCK.run(y, weights, ints, floats, out, all_sums=sums.data_ptr())
    BLOCK.run(y, weights, ints, floats, out, sums=out.data_ptr())
    return out


def _flops(shapes: Inputs) -> int:
    """FLOPs of the products, convolutions and inner models on the band's own tokens."""
    height, width, above, below, _, *sizes = shapes.ints
    s, dim = Vit3BlockSizes(*sizes), shapes.y[-1]
    d = dim // s.heads
    if shapes.sums is None:
        each = (2 * (dim + d) + 9) * dim + 2 * 2 * dim * d + 9 * d
    else:
        each = (2 * (dim + d) + 2 * s.hidden + 9) * dim + 2 * dim * d + 9 * d
    return 2 * (height - above - below) * width * each


OP = Op(
    "packed_vit3_band",
    Inputs,
    BLOCK.contract("words", ("ints", "floats"), sums="? numbers"),
    packed_vit3_band_definition,
    {"cpu": Backend(_forward, None, BLOCK.refusal)},
    _result,
    schema="(Tensor y, Tensor weights, Tensor? sums, SymInt[] ints, float[] floats) -> Tensor",
    flops=_flops,
)


def packed_vit3_band(
    y: Tensor,
    weights: Tensor,
    sums: Tensor | None,
    sizes: Vit3BlockSizes,
    *,
    rows: tuple[int, int, int],
    total: int,
    loss_scale: float,
    eps: tuple[float, float],
) -> Tensor:
    """Run one of the two sweeps of a ViT³ block on some rows of a picture, on a CPU.

    The first sweep sums the gradients for the step of the inner models over the band's tokens; the
    caller adds the sums of all bands. The second sweep runs the block. Rounding is that of
    :func:`packed_vit3_block`.

    Args:
        y: tokens [1, T, D], float32, of the band's rows and of two rows on either side, as far as
            the picture has them.
        weights: the block's parameters, from ``BLOCK.join``.
        sums: [S] of all bands, for the second sweep; None for the first one.
        sizes: the block's sizes. The MLP must not convolve, and the block must not be modulated.
        rows: the width, and the numbers of rows above and below the band's rows.
        total: the number of the picture's tokens.
        loss_scale, eps: as of :func:`packed_vit3_block`.

    Returns:
        The sums [S] of this band, or the block's tokens [1, n, D].

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the tensors and numbers do not fit one block.
    """
    width, above, below = rows
    check_number(BLOCK.name, "width", width, Whole(1))
    numbers = y.shape[1] // width, width, above, below, total, *sizes
    return call(OP, Inputs(y, weights, sums, numbers, (loss_scale, *eps)))
