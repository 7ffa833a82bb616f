"""Parts of mini-batches by the CPU kernels, without gradients: what a decoded token costs.

The custom op ``vision_ttt::NAME_part`` goes through tokens of one mini-batch, usually a single one:
O(d²) per token and head, which is what reading the state costs. It is opaque to torch.compile and
torch.export.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops import _learner_cpu
from vision_ttt.ops._contract import Contract, check_range
from vision_ttt.ops._dispatcher_bypass import may_bypass_dispatcher
from vision_ttt.ops._learner_cpu import LearnerCall
from vision_ttt.ops._learner_mini_batches import (
    Opened,
    OpenMiniBatch,
    Parts,
    Tensors,
    no_tokens,
)
from vision_ttt.ops._op import Op


class LearnerPart:
    """A learner op on a part of a mini-batch, and its custom op ``vision_ttt::NAME_part``.

    Args:
        op: the learner op.
        call: its calls of the CPU kernels.
        contract: the checks of the custom op.
        names: of the state's tensors among the op's inputs.
        mini_batch: the op's dual form on a part of a mini-batch.
        flops: (inputs with shapes for tensors) → floating point operations.
    """

    def __init__(
        self,
        op: Op,
        call: type[LearnerCall],
        contract: Contract,
        names: Sequence[str],
        mini_batch: OpenMiniBatch,
        flops: Callable[[Any], int],
    ) -> None:
        self.op, self.call, self.contract = op, call, contract
        self.names, self.mini_batch = names, mini_batch
        name = f"vision_ttt::{op.name}_part"
        optional = (*contract.others, "ln_weight", "ln_bias", "position_scale")
        tensors = (*contract.tensors, *contract.others)
        arguments = ", ".join(f"Tensor{'?' if x in optional else ''} {x}" for x in tensors)
        numbers = "SymInt position, SymInt mini_batch_size, float eps, bool return_state"
        torch.library.define(name, f"({arguments}, {numbers}) -> Tensor[]")
        torch.library.impl(name, "CPU", self._checked)
        torch.library.register_fake(name, self._fake)
        namespace = torch.ops.vision_ttt
        self.custom_op = getattr(namespace, f"{op.name}_part").default
        formula = register_flop_formula(getattr(namespace, f"{op.name}_part"))
        formula(lambda *arguments, **_: flops(self._split(arguments)[0]))

    def refusal(self, inputs: Any, state: Sequence[Tensor]) -> str | None:
        """The reason why the kernels do not support a part of these inputs, or None if they do."""
        if torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in (*inputs, *state)
        ):
            return "a gradient is wanted"
        return _learner_cpu.refusal(inputs)

    def run(self, inputs: Any, opened: Opened, goes_on: bool) -> tuple[Tensor, Opened]:
        """Go through tokens of one mini-batch: o [B, n, H, d], and where the sequence is then."""
        start, sums, position, _ = opened
        count, each = len(self.names), isinstance(position, Tensor)
        inputs = inputs._replace(**dict(zip(self.names, start, strict=True)))
        places = position.to(torch.int64).contiguous() if each else position
        if may_bypass_dispatcher((*inputs, *sums)):
            o, *states = self._compute(inputs, sums, places, goes_on)
        else:
            numbers = (places, 0) if each else (None, places)
            options = inputs.mini_batch_size, inputs.eps, goes_on
            o, *states = self.custom_op(*inputs[:-3], *sums, *numbers, *options)
        if not goes_on:
            return o, opened
        last, sums, after = (tuple(states[i * count : (i + 1) * count]) for i in range(3))
        if each:
            position = position + 1
            full = position == inputs.mini_batch_size
            return o, Opened(after, sums, position.masked_fill(full, 0), last)
        if not sums:
            return o, no_tokens(last)
        return o, Opened(start, sums, position + inputs.q.shape[1], last)

    def _split(self, arguments: Sequence[Any]) -> tuple[Any, tuple[Any, ...], Any]:
        """The custom op's arguments as the op's inputs, the sums, and the position."""
        count = len(self.names)
        tensors, numbers = arguments[: 7 + 2 * count], arguments[7 + 2 * count :]
        positions, position, mini_batch_size, eps, *_ = numbers
        inputs = self.op.inputs(*tensors[: 7 + count], mini_batch_size, 0, eps)
        return inputs, tensors[7 + count :], position if positions is None else positions

    def _checked(self, *arguments: Any) -> list[Tensor]:
        """The custom op on a CPU; PyTorch's operations run what the kernels do not support."""
        self.contract.check(arguments[:-1])
        inputs, sums, position = self._split(arguments)
        if _learner_cpu.refusal(inputs) is not None:
            return self.definition(*arguments)
        return self._compute(inputs, sums, position, arguments[-1])

    def _compute(
        self, inputs: Any, sums: Tensors, position: int | Tensor, return_state: bool
    ) -> list[Tensor]:
        """The kernels' results, without PyTorch's dispatcher and the contract."""
        self._check_positions(position, inputs.mini_batch_size)
        start = [getattr(inputs, name) for name in self.names]
        if all(len(x) and x.stride(0) == 0 for x in start):  # one state of all sequences
            first = dict(zip(self.names, (x[0] for x in start), strict=True))
            inputs = inputs._replace(**first)
        return self.call(inputs).part(sums, position, return_state)

    def definition(self, *arguments: Any) -> list[Tensor]:
        """The custom op by PyTorch's operations, from the same arguments."""
        inputs, sums, position = self._split(arguments)
        self._check_positions(position, inputs.mini_batch_size)
        dtype = torch.promote_types(inputs.q.dtype, torch.float32)
        start = tuple(getattr(inputs, name).to(dtype) for name in self.names)
        each = isinstance(position, Tensor)
        if each:  # the sums of a mini-batch without tokens are not read
            empty = (position == 0).to(start[0].device)
            sums = [s.masked_fill(empty.reshape(-1, *[1] * (s.ndim - 1)), 0) for s in sums]
        opened = no_tokens(start)
        if each or position:
            opened = Opened(start, tuple(s.to(dtype) for s in sums), position)
        parts = Parts(self.op, inputs, self.names, self.mini_batch, None)
        o, opened = parts.open(opened, 0, inputs.q.shape[1])
        if not arguments[-1]:
            return [o]
        results = [o, *parts.after(opened)]
        if each or opened.position:
            results += opened.sums
        if each:
            results += opened.start
        return [x.clone(memory_format=torch.contiguous_format) for x in results]

    def _check_positions(self, position: int | Tensor, size: int) -> None:
        if isinstance(position, Tensor):
            check_range(self.op.name, "positions", position, size - 1)

    def _fake(self, *arguments: Any) -> list[Tensor]:
        inputs, sums, position = self._split(arguments)
        each = isinstance(position, Tensor)
        o = inputs.q.new_empty(inputs.q.shape)
        if not arguments[-1]:
            return [o]
        dtype = torch.promote_types(o.dtype, torch.float32)
        states = 1 + (each or position + o.shape[1] < inputs.mini_batch_size) + each
        return [o, *(s.new_empty(s.shape, dtype=dtype) for _ in range(states) for s in sums)]
