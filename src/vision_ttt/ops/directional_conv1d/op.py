"""The public function of directional_conv1d and its registration."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.ops._op import Op
from vision_ttt.ops._torch_function import overridable
from vision_ttt.ops.directional_conv1d import cpu, triton_backend
from vision_ttt.ops.directional_conv1d.contract import BACKWARD_CONTRACT, CONTRACT, Inputs
from vision_ttt.ops.directional_conv1d.definition import directional_conv1d_definition


def _fake(inputs: Inputs) -> Tensor:
    return inputs.x.new_empty(inputs.x.shape)


def _flops(shapes: Inputs) -> int:
    """K multiply-adds per token and channel."""
    batch, length, channels = shapes.x
    return 2 * batch * length * channels * shapes.weight[-1]


OP = Op(
    "directional_conv1d",
    Inputs,
    CONTRACT,
    directional_conv1d_definition,
    {"cpu": cpu.BACKEND, "triton": triton_backend.BACKEND},
    _fake,
    schema="(Tensor x, Tensor weight, Tensor bias, SymInt reverse_channels) -> Tensor",
    backward_schema="(Tensor grad, Tensor x, Tensor weight, Tensor bias, SymInt reverse_channels) "
    "-> (Tensor, Tensor, Tensor)",
    backward_contract=BACKWARD_CONTRACT,
    flops=_flops,
    backward_flops=lambda shapes: 2 * _flops(shapes),  # one part for x, one for the weights
)


@overridable
def directional_conv1d(x: Tensor, weight: Tensor, bias: Tensor, reverse_channels: int) -> Tensor:
    """Convolve each channel with taps of its own, causally in its scan direction.

    With K taps, y_t = bias + Σ_j weight_j x_{t-(K-1)+j}. The last ``reverse_channels`` channels
    scan from T to 1 and use x_{t+(K-1)-j} instead. Beyond the ends x is zero.

    Args:
        x: [B, T, C] of any strides. The kernels copy x unless its last axis is contiguous.
        weight: [C, 1, K], as of a depth-wise ``nn.Conv1d``.
        bias: [C].
        reverse_channels: the number of channels, at the end, that scan from T to 1.

    Returns:
        [B, T, C], contiguous, differentiable in x, weight and bias.

    Raises:
        TypeError: a dtype or type is not accepted.
        ValueError: weight, bias or reverse_channels do not fit x's C channels, or the requested
            backend does not support the call.
    """
    return OP(Inputs(x, weight, bias, reverse_channels))
