"""gated_norm on a GPU: the supported inputs and the launches of both passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _triton
from vision_ttt.ops._native import contiguous_last
from vision_ttt.ops._op import Backend
from vision_ttt.ops.gated_norm.contract import Inputs

LARGEST_TILE = 2**13
"""The largest R · D of a token, padded. The registers of a program hold hardly more."""
MOST_TOKENS = 2**30
"""The largest number of tokens: their indices have 32 bits, their addresses 64."""

FORWARD_PROGRAMS = 4096
"""The most programs of the forward pass. A large GPU runs about so many at once, and each one loads
γ and β."""
BACKWARD_PROGRAMS = 2048
"""The most programs of the backward pass."""
SHORTEST_SHARE = 16
"""The fewest tokens whose gradients of γ and β a program sums. More tokens write fewer shares."""


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    parts, dim = inputs.weight.shape
    batch, length, _ = inputs.z.shape
    if _padded(parts) * _padded(dim) > LARGEST_TILE:
        return f"{parts} · {dim} channels, each padded to a power of two, are over {LARGEST_TILE}"
    if batch * length > MOST_TOKENS:
        return f"{batch * length} tokens are over {MOST_TOKENS}"
    return _triton.refusal(*inputs[:4])


class _Launch:
    """The sizes of a call's tiles and programs.

    A warp holds at most 512 of a token's D numbers, or 1024 of its R · D, in registers. Up to
    D = 512 a tile has one warp, so that a mean needs no exchange between warps. A tile holds
    several narrow tokens, of about ``tile`` numbers.
    """

    def __init__(
        self, z: Tensor, weight: Tensor, *, tile: int, programs: int, shortest: int = 1
    ) -> None:
        parts, dim = weight.shape
        padded_parts, block = _padded(parts), _padded(dim)
        numbers = max(1, min(512, 1024 // padded_parts))
        tile = max(1, min(tile, numbers) // block)
        self.tokens, self.length = z.shape[0] * z.shape[1], z.shape[1]
        self.chunk = tile * -(-max(-(-self.tokens // programs), shortest) // tile)
        self.programs = -(-self.tokens // self.chunk)
        self.options: dict[str, Any] = {
            "PARTS": parts,
            "DIM": dim,
            "TOKENS": tile,
            "PADDED_PARTS": padded_parts,
            "BLOCK": block,
            "num_warps": min(32, max(1, block // numbers)),
            "num_stages": 1,
            "enable_fp_fusion": True,
        }

    def run(self, kernel: Any, *arguments: Any, eps: float) -> None:
        sizes = (self.tokens, self.length, self.chunk)
        kernel[(self.programs,)](*arguments, *sizes, eps, **self.options)


def _strides(x: Tensor | None) -> tuple[int, int] | None:
    return None if x is None else x.stride()[:2]


def _forward(inputs: Inputs) -> Tensor:
    from vision_ttt.ops.gated_norm import triton_kernels

    z, gate, weight, bias, eps = inputs
    z, gate = contiguous_last(z), None if gate is None else contiguous_last(gate)
    weight, bias = weight.contiguous(), bias.contiguous()
    launch = _Launch(z, weight, tile=512, programs=FORWARD_PROGRAMS)
    out = z.new_empty(*z.shape[:2], weight.shape[1])
    with torch.cuda.device_of(z):
        launch.run(
            triton_kernels.forward_kernel,
            *(z, gate, weight, bias, out, _strides(z), _strides(gate)),
            eps=eps,
        )
    return out


def _backward(inputs: Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from vision_ttt.ops.gated_norm import triton_kernels

    z, gate, weight, bias, eps = inputs
    grad, z = contiguous_last(grad), contiguous_last(z)
    gate = None if gate is None else contiguous_last(gate)
    gain, offset = weight.contiguous(), bias.contiguous()
    # Tiles are small, because the sums for γ and β stay in registers too.
    launch = _Launch(z, weight, tile=256, programs=BACKWARD_PROGRAMS, shortest=SHORTEST_SHARE)
    dz = z.new_empty(z.shape)
    dgate = None if gate is None else gate.new_empty(gate.shape)
    # Every program writes its own share, and PyTorch sums the shares in a fixed order. The share of
    # β is the same for all directions.
    dweight = z.new_empty(launch.programs, *weight.shape, dtype=torch.float32)
    dbias = z.new_empty(launch.programs, 1, weight.shape[1], dtype=torch.float32)
    with torch.cuda.device_of(z):
        launch.run(
            triton_kernels.backward_kernel,
            *(grad, z, gate, gain, offset, dz, dgate, dweight, dbias),
            *map(_strides, (grad, z, gate)),
            eps=eps,
        )
    dweight = dweight.sum(0).to(weight.dtype)
    dbias = dbias.sum(0).to(bias.dtype).repeat(bias.shape[0], 1)
    return dz, z.new_empty(0) if dgate is None else dgate, dweight, dbias


BACKEND = Backend(_forward, _backward, refusal)
