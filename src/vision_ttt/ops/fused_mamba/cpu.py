"""fused_mamba on a CPU: the compiled kernels of its parts."""

from __future__ import annotations

from vision_ttt.ops import _native
from vision_ttt.ops.directional_conv1d import cpu as convolution
from vision_ttt.ops.fused_mamba.contract import Inputs
from vision_ttt.ops.fused_mamba.recomputing import Parts, recomputing
from vision_ttt.ops.fused_mamba.silu import silu, silu_backward
from vision_ttt.ops.linear import cpu as product
from vision_ttt.ops.selective_scan import cpu as recurrence


def refusal(x: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    return _native.no_vectors(x.inner()) or _native.refusal(*x)


BACKEND = recomputing(
    Parts(convolution.BACKEND, recurrence.BACKEND, product.BACKEND, silu, silu_backward), refusal
)
