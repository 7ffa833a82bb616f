"""linear_pair on a CPU: the compiled kernels in csrc/linear."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.ops import _native
from vision_ttt.ops._op import Backend
from vision_ttt.ops.linear import contract as linear
from vision_ttt.ops.linear import cpu as linear_cpu
from vision_ttt.ops.linear.cpu import NarrowLinear, solve
from vision_ttt.ops.linear_pair.contract import Inputs


def refusal(inputs: Inputs) -> str | None:
    """The reason why the kernels do not support the inputs, or None if they do."""
    return linear_cpu.refusal(_wide(inputs)) or _native.refusal(*inputs)


def _wide(inputs: Inputs) -> linear.Inputs:
    return linear.Inputs(inputs.x, inputs.wide, None)


def _contiguous(inputs: Inputs) -> Inputs:
    return Inputs(*(tensor.contiguous() for tensor in inputs))


def _narrow(inputs: Inputs, *tensors: Tensor | None) -> NarrowLinear:
    """Describe the narrow layer; the tensors are its grad, out, dweight and dbias."""
    given = inputs.narrow, inputs.narrow_bias, *tensors
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in given)
    return NarrowLinear(*pointers, inputs.narrow.shape[0])


def _forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    inputs = _contiguous(inputs)
    lead = inputs.x.shape[:-1]
    wide, narrow = (inputs.x.new_empty(*lead, w.shape[0]) for w in (inputs.wide, inputs.narrow))
    of_narrow = _narrow(inputs, None, narrow, None, None)
    solve("vision_ttt_linear", _wide(inputs), None, wide, None, None, narrow=of_narrow)
    return wide, narrow


def _backward(inputs: Inputs, grad_wide: Tensor, grad_narrow: Tensor) -> tuple[Tensor, ...]:
    inputs = _contiguous(inputs)
    grad_wide, grad_narrow = (
        grad.to(inputs.x.dtype).contiguous() for grad in (grad_wide, grad_narrow)
    )
    dx, dwide, dnarrow, dbias = (torch.empty_like(tensor) for tensor in inputs)
    of_narrow = _narrow(inputs, grad_narrow, None, dnarrow, dbias)
    solve("vision_ttt_linear_backward", _wide(inputs), grad_wide, None, dx, dwide, narrow=of_narrow)
    return dx, dwide, dnarrow, dbias


BACKEND = Backend(_forward, _backward, refusal)
