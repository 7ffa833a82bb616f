"""Ops that process part of a mini-batch by kernels, without gradients, as in decoding.

The op ``NAME_part`` processes tokens of one mini-batch, usually a single token. It costs O(d²) per
token and head, as much as reading the state.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _learner_cpu, _learner_triton
from vision_ttt.ops._contract import Contract, check_range
from vision_ttt.ops._learner_mini_batches import Opened, Parts, no_tokens
from vision_ttt.ops._learner_op import part_flops
from vision_ttt.ops._op import Backend, Op


def learner_part(op: Op, contract: Contract, launch: Callable[..., None]) -> Op:
    """Make the op of a part of a learner op's mini-batch.

    Its result is o. With ``return_state`` it also returns θ_T of the last token, the sums after it
    unless all sequences have one position and the tokens complete the mini-batch, and θ' of the
    next token if each sequence has its own position.

    Args:
        op: the learner op.
        contract: the checks of its arguments.
        launch: runs the op's Triton kernel for a part, see
            :func:`vision_ttt.ops._learner_triton.run_part`.
    """
    inputs_type = namedtuple("Inputs", contract.names)
    count = len(op.inputs._fields) - 10  # tensors of the state

    def parted(x: Any) -> tuple[Any, tuple[Any, ...], Any]:
        """The learner's inputs, the sums, and the position: a number, or a tensor of one each."""
        inputs = op.inputs(*x[: 7 + count], x.mini_batch_size, 0, x.eps)
        return inputs, x[7 + count : 7 + 2 * count], x.position if x[-5] is None else x[-5]

    def checked(x: Any) -> tuple[Any, tuple[Any, ...], Any]:
        """As :func:`parted`, with checked positions, and a state that all sequences share once."""
        inputs, sums, position = parted(x)
        if isinstance(position, Tensor):
            check_range(op.name, "positions", position, x.mini_batch_size - 1)
            position = position.contiguous()
        start = x[4 : 4 + count]
        if all(len(s) and s.stride(0) == 0 for s in start):
            inputs = op.inputs(*x[:4], *(s[0] for s in start), *inputs[4 + count :])
        return inputs, sums, position

    def on_cpu(x: Any) -> list[Tensor]:
        inputs, sums, position = checked(x)
        return _learner_cpu.LearnerCall(inputs).part(sums, position, x.return_state)

    def by_triton(x: Any) -> list[Tensor]:
        return _learner_triton.run_part(launch, *checked(x), x.return_state)

    def definition(x: Any) -> list[Tensor]:
        inputs, sums, position = parted(x)
        each = isinstance(position, Tensor)
        dtype = torch.promote_types(x.q.dtype, torch.float32)
        start = tuple(s.to(dtype) for s in x[4 : 4 + count])
        if each:
            check_range(op.name, "positions", position, x.mini_batch_size - 1)
        opened = no_tokens(start)
        if each or position:
            opened = Opened(start, tuple(s.to(dtype) for s in sums), position)
        parts = Parts(op, inputs, None)
        o, opened = parts.open(opened, 0, x.q.shape[1])
        if not x.return_state:
            return [o]
        results = [o, *parts.last_state(opened)]
        if each or opened.position:
            results += opened.sums
        if each:
            results += opened.start
        return [r.clone(memory_format=torch.contiguous_format) for r in results]

    def fake(x: Any) -> list[Tensor]:
        _, sums, position = parted(x)
        o = x.q.new_empty(x.q.shape)
        if not x.return_state:
            return [o]
        each, dtype = isinstance(position, Tensor), torch.promote_types(o.dtype, torch.float32)
        # bool: PyTorch 2.11 does not compile the sum of a number and a symbolic truth value.
        open_after = each or bool(position + o.shape[1] < x.mini_batch_size)
        states = 1 + open_after + each
        return [o, *(s.new_empty(s.shape, dtype=dtype) for _ in range(states) for s in sums)]

    optional = "ln_weight", "ln_bias", "position_scale", *contract.others
    tensors = (*contract.tensors, *contract.others)
    arguments = ", ".join(f"Tensor{'?' if x in optional else ''} {x}" for x in tensors)
    return Op(
        f"{op.name}_part",
        inputs_type,
        contract,
        definition,
        {
            "cpu": Backend(on_cpu, None, _learner_cpu.refusal),
            "triton": Backend(by_triton, None, _learner_triton.refusal),
        },
        fake,
        schema=f"({arguments}, SymInt position, SymInt mini_batch_size, float eps, "
        "bool return_state) -> Tensor[]",
        autocast=("q", "k", "v"),
        flops=lambda shapes: part_flops(parted(shapes)[0]),
    )
