"""depthwise_correlation on a CPU: the compiled kernels in csrc/convolutions/conv2d."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._op import Backend
from vision_ttt.ops.depthwise_conv2d.cpu import correlate
from vision_ttt.ops.vit3_ttt.contract import Inputs


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    return _native.no_vectors(inputs.x.shape[-1]) or _native.refusal(inputs.x, inputs.y)


def _forward(inputs: Inputs) -> Tensor:
    return correlate(inputs.x, inputs.y, inputs.kernel_size, inputs.grid())


BACKEND = Backend(_forward, None, refusal)
