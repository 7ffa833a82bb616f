"""The common part of the learner ops: schemas, shapes, saved states, FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _learner_cpu, _learner_dual
from vision_ttt.ops._learner_contract import LearnerContracts
from vision_ttt.ops._learner_dual import checkpoint_interval, initial_state, num_checkpoints
from vision_ttt.ops._learner_scan_order import mini_batches
from vision_ttt.ops._op import Backend, Op


def _products(inputs: Any, tokens: int, wide: int, between: int, narrow: int) -> int:
    """FLOPs of products in a mini-batch of n tokens.

    A layer [i, j] has ``wide`` products n·i·j, and ``narrow`` pairs of n·n·i and n·n·j. There are
    ``between`` further products n·i·j between two layers.
    """
    layers, dim = len(initial_state(inputs)) // 2, inputs.q[-1]
    hidden = dim if layers == 1 else inputs.w1[-1]
    products = (wide * layers + between * (layers - 1)) * dim * hidden
    return 2 * tokens * (products + narrow * layers * tokens * (dim + hidden))


def learner_flops(shapes: Any) -> int:
    """FLOPs of the forward pass.

    A head with a linear inner model takes 3 T d² + 2 b T d multiply-adds (Vision-TTT, Eq. 13), and
    a head with an MLP of hidden width 4 d takes 28 T d² + 10 b T d.
    """
    batch, length, heads, _ = shapes.q
    sizes = [stop - start for start, stop in mini_batches(length, shapes.mini_batch_size)]
    return batch * heads * sum(_products(shapes, n, 3, 1, 1) for n in sizes)


def learner_backward_flops(shapes: Any) -> int:
    """FLOPs of every mini-batch's products, of their derivatives and of the state's replay."""
    batch, length, heads, dim = shapes.q
    sizes = [stop - start for start, stop in mini_batches(length, shapes.mini_batch_size)]
    layers = len(initial_state(shapes)) // 2
    interval = checkpoint_interval(dim, shapes.mini_batch_size, layers)
    replayed = [n for i, n in enumerate(sizes[:-1]) if (i + 1) % interval]
    total = sum(_products(shapes, n, 8, 3, 3) for n in sizes)
    return batch * heads * (total + sum(_products(shapes, n, 2, 1, 0) for n in replayed))


def part_flops(shapes: Any) -> int:
    """FLOPs of a part of a mini-batch, which also reads and adds to the sums."""
    batch, length, heads, _ = shapes.q
    return batch * heads * _products(shapes, length, 4, 1, 1)


def learner_op(
    name: str,
    inputs: type[Any],
    contracts: LearnerContracts,
    definition: Callable[[Any], tuple[Tensor, ...]],
    backends: dict[str, Backend],
    exported: Callable[[Any], tuple[Tensor, ...]],
) -> Op:
    """Make the :class:`Op` of a learner.

    Its results are o and the last state. It saves intermediate states for the backward pass.

    Args:
        name, inputs, definition: see :class:`Op`.
        contracts: the checks of the public function and of the custom ops.
        backends: the op's backends besides the dual form in PyTorch and the compiled CPU kernels.
        exported: see :class:`Op`.
    """
    state = inputs._fields[4:-6]
    names = list(contracts.public.tensors)
    optional = names[-3:]
    arguments = ", ".join(f"Tensor{'?' if x in optional else ''} {x}" for x in names)
    options = "SymInt mini_batch_size, int reverse_heads, float eps"
    kept = _tensors("kept_", state)
    ranks = (2, 1) * (len(state) // 2)

    def places(x: Any) -> int:
        _, length, _, dim = x.q.shape
        return num_checkpoints(length, dim, x.mini_batch_size, len(ranks) // 2)

    def fake(x: Any, save_states: bool) -> tuple[Tensor, ...]:
        batch, _, heads, _ = x.q.shape
        dtype = torch.promote_types(x.q.dtype, torch.float32)
        count = places(x) if save_states else 0
        shapes = [s.shape[-rank:] for s, rank in zip(initial_state(x), ranks, strict=True)]
        new = x.q.new_empty
        return (
            new(x.q.shape),
            *(new(batch, heads, *shape, dtype=dtype) for shape in shapes),
            *(new(count, batch, heads, *shape, dtype=dtype) for shape in shapes),
        )

    return Op(
        name,
        inputs,
        contracts.public,
        definition,
        {"cpu": _learner_cpu.BACKEND, **backends, "dual": _learner_dual.BACKEND},
        fake,
        schema=f"({arguments}, {options}, bool save_states, str backend) "
        f"-> (Tensor o, {_tensors('last_', state)}, {kept})",
        backward_schema=f"(Tensor grad_o, {_tensors('grad_', state)}, {arguments}, {kept}, "
        f"{options}, str backend) -> ({_tensors('d', names)})",
        backward_contract=contracts.backward,
        bare_contract=contracts.forward,
        results=1 + len(state),
        kept=places,
        autocast=("q", "k", "v"),
        exported=exported,
        flops=learner_flops,
        backward_flops=learner_backward_flops,
    )


def _tensors(prefix: str, names: Sequence[str]) -> str:
    """Tensor arguments or results of a schema, their names with a prefix."""
    return ", ".join(f"Tensor {prefix}{name}" for name in names)
