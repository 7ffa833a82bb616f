"""The op ``vision_ttt::packed_vit3_block``: a whole block of ViT³ with packed weights."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._contract import check_storages
from vision_ttt.ops._dispatcher_bypass import may_bypass_dispatcher
from vision_ttt.ops._native import LANES, LIBRARY, mirrors
from vision_ttt.ops.packed.launch import launch
from vision_ttt.ops.packed.weights import (
    DTYPES,
    NormStructure,
    PackedStructure,
    packed_shape,
    resolve_negative,
)


class Vit3BlockParameters(NamedTuple):
    """A block's parameters; a part that the block lacks has an empty tensor.

    D channels, H heads of d = D / H channels. The packed tensors share a dtype, the others are
    float32.
    """

    conv2d: Tensor  # [9, D]
    conv2d_bias: Tensor  # [D]
    norm1_weight: Tensor  # [D]
    norm1_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    modulation: Tensor  # [B, 6, D]: shift, scale and gate of either branch, in the norms' place
    qkv: Tensor  # packed [3 (D + d), D]
    qkv_bias: Tensor
    units: Tensor  # [H, d, 2 d]: W₂ beside W₁
    kernels: Tensor  # [9, d]
    proj: Tensor  # packed [D, D + d]
    proj_bias: Tensor
    fc1: Tensor  # packed [hidden, D]
    fc1_bias: Tensor
    fc2: Tensor  # packed [D, hidden]
    fc2_bias: Tensor
    mlp_conv: Tensor  # [9, hidden]
    mlp_conv_bias: Tensor  # [hidden]
    rotations: Tensor  # [T, D / 2, 2]


PACKED = ("qkv", "proj", "fc1", "fc2")
"""Names of the packed parameters."""
_INTS = "height", "width", "heads", "hidden", "tanh_gelu"
_FLOATS = "loss_scale", "norm1_eps", "norm2_eps"


def packed_vit3_block(
    y: Tensor,
    parameters: Vit3BlockParameters,
    *,
    grid: tuple[int, int],
    heads: int,
    hidden: int,
    tanh_gelu: bool,
    loss_scale: float,
    eps: tuple[float, float],
) -> Tensor:
    """One block of ViT³, H-ViT³ or DiT³, for inference on a CPU.

    Factors of products are rounded to the packed weights' dtype. Sums, norms, the inner models'
    steps and the tokens are float32.

    Args:
        y: tokens [B, T, D], float32. It is not modified.
        parameters: the block's parameters.
        grid: (h, w) with T = h · w.
        heads: H.
        hidden: the MLP's hidden width.
        tanh_gelu: whether the MLP's GELU is the tanh approximation.
        loss_scale: c, see :func:`vision_ttt.ops.vit3_ttt.gated_unit_step`.
        eps: added to the variances of the two norms.

    Returns:
        [B, T, D].

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the tensors and numbers do not fit one block, the kernels do not support its
            sizes, or the kernels are missing.
    """
    ints, floats = [*grid, heads, hidden, int(tanh_gelu)], [loss_scale, *eps]
    if may_bypass_dispatcher((y, *parameters)):
        return _packed_vit3_block(y, parameters, ints, floats)
    return torch.ops.vision_ttt.packed_vit3_block(y, list(parameters), ints, floats)


torch.library.define(
    "vision_ttt::packed_vit3_block",
    "(Tensor y, Tensor[] parameters, SymInt[] ints, float[] floats) -> Tensor",
)


@mirrors("PackedVit3Block")
class _PackedVit3Block(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("y", "out", "scratch", "conv2d", "conv2d_bias")),
        *((name, NormStructure) for name in ("norm1", "norm2")),
        *((name, c_void_p) for name in ("gate1", "gate2")),
        *((name, PackedStructure) for name in PACKED),
        *((name, c_void_p) for name in ("rotations", "units", "kernels")),
        *((name, c_void_p) for name in ("mlp_conv", "mlp_conv_bias")),
        *((name, c_int64) for name in ("batch", "length", "height", "width", "dim", "heads")),
        *((name, c_int64) for name in ("gate_stride", "tanh_gelu", "is_bfloat16", "threads")),
        ("loss_scale", c_double),
    )


def refusal(dim: int, heads: int, hidden: int) -> str | None:
    """The reason why the kernels do not support a block of these sizes, or None if they do."""
    if LIBRARY is None:
        return "the compiled kernels are missing"
    for name, size in (("dim", dim), ("head dimension", dim // heads), ("hidden", hidden)):
        if size % LANES:
            return f"{name} {size} is not a multiple of {LANES}"
    return None


def check_parameters(
    parameters: Vit3BlockParameters, *, heads: int, hidden: int, modulated: bool
) -> None:
    """Raise an error unless the parameters fit one block, as a call would.

    Args:
        modulated: whether calls replace the norms' weights and biases by a modulation.

    Raises:
        ValueError: a shape is another.
        TypeError: a dtype is another.
    """
    dim = len(parameters.conv2d_bias)
    if modulated:
        parameters = parameters._replace(modulation=parameters.conv2d_bias.new_empty(1, 6, dim))
    shapes, dtypes = tuple(x.shape for x in parameters), tuple(x.dtype for x in parameters)
    _check(torch.Size((1, 1, dim)), shapes, dtypes, (1, 1, heads, hidden, 0))


@functools.lru_cache(maxsize=256)
def _check(
    y: torch.Size,
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    ints: tuple[int, ...],
) -> None:
    """Raise an error unless these shapes, dtypes and numbers fit one block."""
    names = Vit3BlockParameters._fields
    if len(shapes) != len(names) or len(ints) != len(_INTS):
        raise ValueError(
            f"packed_vit3_block: needs {len(names)} parameters and {_INTS}, got {len(shapes)} and "
            f"{len(ints)} numbers"
        )
    height, width, heads, hidden, _ = ints
    if len(y) != 3 or min(height, width, heads, hidden) < 1 or y[1] != height * width:
        raise ValueError(
            f"packed_vit3_block: y must be [B, {height} * {width}, D], got {list(y)}, {ints}"
        )
    batch, length, dim = y
    if dim % heads:
        raise ValueError(f"packed_vit3_block: {dim} channels are not a multiple of {heads} heads")
    reason = refusal(dim, heads, hidden)
    if reason:
        raise ValueError(f"packed_vit3_block: {reason}")
    has, given = dict(zip(names, shapes, strict=True)), dict(zip(names, dtypes, strict=True))
    d, dtype = dim // heads, given["qkv"]
    views = 3 * (dim + d)

    def if_there(name: str, *shape: int) -> tuple[int, ...]:
        return shape if has[name].numel() else (0,)

    modulated = has["modulation"].numel() > 0
    norms = ("norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias")
    wanted: dict[str, tuple[int, ...]] = {
        "conv2d": (9, dim),
        "conv2d_bias": (dim,),
        **dict.fromkeys(norms, (0,) if modulated else (dim,)),
        "modulation": if_there("modulation", batch, 6, dim),
        "qkv": packed_shape(views, dim, dtype, of_block=True),
        "qkv_bias": if_there("qkv_bias", views),
        "units": (heads, d, 2 * d),
        "kernels": (9, d),
        "proj": packed_shape(dim, dim + d, dtype, of_block=True),
        "proj_bias": if_there("proj_bias", dim),
        "fc1": packed_shape(hidden, dim, dtype, of_block=True),
        "fc1_bias": (hidden,),
        "fc2": packed_shape(dim, hidden, dtype, of_block=True),
        "fc2_bias": (dim,),
        "mlp_conv": if_there("mlp_conv", 9, hidden),
        "mlp_conv_bias": (hidden,) if has["mlp_conv"].numel() else (0,),
        "rotations": if_there("rotations", length, dim // 2, 2),
    }
    for name, shape in wanted.items():
        if has[name] != shape:
            raise ValueError(
                f"packed_vit3_block: {name} must be {list(shape)}, got {list(has[name])}"
            )
        right = dtype if name in PACKED else torch.float32
        if given[name] != right or dtype not in DTYPES:
            raise TypeError(f"packed_vit3_block: {name} must be {right}, got {given[name]}")


def _packed_vit3_block(
    y: Tensor, parameters: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> Tensor:
    if not isinstance(y, Tensor):  # PyTorch passes None for a tensor without complaint
        raise TypeError(f"packed_vit3_block: y must be a tensor, got {y!r}")
    if len(floats) != len(_FLOATS) or y.dtype != torch.float32:
        raise TypeError(
            f"packed_vit3_block: y must be float32 and floats {_FLOATS}, got {y.dtype}, {floats}"
        )
    shapes, dtypes = tuple(x.shape for x in parameters), tuple(x.dtype for x in parameters)
    _check(y.shape, shapes, dtypes, tuple(ints))
    if any(not x.is_cpu or x.layout != torch.strided for x in (y, *parameters)):
        got = sorted({f"{x.layout} on {x.device}" for x in (y, *parameters)})
        raise ValueError(f"packed_vit3_block: tensors must be dense and on a CPU, got {got}")
    named = Vit3BlockParameters(*parameters)._asdict()
    check_storages("packed_vit3_block", {"y": y, **named})
    if not y.numel():
        return y.new_empty(y.shape)
    y = resolve_negative(y).contiguous()
    p = Vit3BlockParameters(*(resolve_negative(x).contiguous() for x in parameters))
    height, width, heads, hidden, tanh_gelu = ints
    loss_scale, *eps = floats
    batch, length, dim = y.shape
    branches, gates = _norms_and_gates(p, eps, dim)
    widths = {"qkv": (3 * (dim + dim // heads), dim), "proj": (dim, dim + dim // heads)}
    widths |= {"fc1": (hidden, dim), "fc2": (dim, hidden)}
    problem = _PackedVit3Block(
        *(None, None, None, p.conv2d.data_ptr(), p.conv2d_bias.data_ptr()),
        *branches,
        *gates,
        *(
            PackedStructure.of(
                getattr(p, name), _or_none(getattr(p, f"{name}_bias")), *widths[name]
            )
            for name in PACKED
        ),
        *(p.rotations.data_ptr() or None, p.units.data_ptr(), p.kernels.data_ptr()),
        *(p.mlp_conv.data_ptr() or None, p.mlp_conv_bias.data_ptr() or None),
        *(batch, length, height, width, dim, heads, 6 * dim),
        *(tanh_gelu, p.qkv.dtype == torch.bfloat16, 0, loss_scale),
    )
    return launch("vision_ttt_packed_vit3_block", problem, y)


def _norms_and_gates(
    p: Vit3BlockParameters, eps: Sequence[float], dim: int
) -> tuple[list[NormStructure], list[int | None]]:
    if not p.modulation.numel():
        norms = (p.norm1_weight, p.norm1_bias), (p.norm2_weight, p.norm2_bias)
        return [NormStructure.of(*norm, e) for norm, e in zip(norms, eps, strict=True)], [None] * 2
    shift1, scale1, gate1, shift2, scale2, gate2 = (
        p.modulation.data_ptr() + 4 * dim * i for i in range(6)
    )
    stride = 6 * dim
    norms = [NormStructure(scale1, shift1, stride, eps[0])]
    norms += [NormStructure(scale2, shift2, stride, eps[1])]
    return norms, [gate1, gate2]


def _or_none(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


torch.library.impl("vision_ttt::packed_vit3_block", "CPU", _packed_vit3_block)


@torch.library.register_fake("vision_ttt::packed_vit3_block")
def _(y: Tensor, *_: object) -> Tensor:
    return y.new_empty(y.shape)


@register_flop_formula(torch.ops.vision_ttt.packed_vit3_block)
def packed_vit3_block_flops(
    y: Sequence[int], shapes: Sequence[Sequence[int]], ints: Sequence[int], *_: object, **__: object
) -> int:
    """FLOPs of the block's products, convolutions and inner models."""
    p = Vit3BlockParameters(*shapes)
    batch, length, dim = y
    d, hidden = p.units[1], ints[3]
    products = (3 * (dim + d) + dim + d + 2 * hidden) * dim
    inner = 3 * 2 * dim * d  # the gated units: outputs on k, gradients, outputs on q
    convolutions = 9 * (dim + 2 * d + (hidden if p.mlp_conv[0] else 0))
    return 2 * batch * length * (products + inner + convolutions)
