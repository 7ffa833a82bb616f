"""The common part of the learner ops: schemas, shapes and saved states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops._learner_contract import LearnerContracts
from vision_ttt.ops._op import Backend, Op


def learner_op(
    name: str,
    inputs: type[Any],
    contracts: LearnerContracts,
    definition: Callable[[Any], tuple[Tensor, ...]],
    backends: Mapping[str, Backend],
    *,
    state: Sequence[str],
    num_checkpoints: Callable[[int, int, int], int],
    exported: Callable[[Any], tuple[Tensor, ...]],
    flops: Callable[[Any], int],
    backward_flops: Callable[[Any], int],
) -> Op:
    """Make the :class:`Op` of a learner: results o and the last state; saved: intermediate states.

    Args:
        name, inputs, definition, backends, exported, flops, backward_flops: see :class:`Op`.
        contracts: the checks of the public function and of the custom ops.
        state: names of the state's tensors: a weight and a bias of every layer.
        num_checkpoints: (T, d, b) → the number of states that a forward pass saves.
    """
    names = list(contracts.public.tensors)
    optional = names[-3:]
    arguments = ", ".join(f"Tensor{'?' if x in optional else ''} {x}" for x in names)
    options = "SymInt mini_batch_size, int reverse_heads, float eps"
    kept = _tensors("kept_", state)
    ranks = (2, 1) * (len(state) // 2)

    def places(x: Any) -> int:
        _, length, _, dim = x.q.shape
        return num_checkpoints(length, dim, x.mini_batch_size)

    def fake(x: Any, save_states: bool) -> tuple[Tensor, ...]:
        batch, _, heads, _ = x.q.shape
        dtype = torch.promote_types(x.q.dtype, torch.float32)
        count = places(x) if save_states else 0
        initial = (getattr(x, name) for name in state)
        shapes = [s.shape[-rank:] for s, rank in zip(initial, ranks, strict=True)]
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
        backends,
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
        flops=flops,
        backward_flops=backward_flops,
    )


def _tensors(prefix: str, names: Sequence[str]) -> str:
    """Tensor arguments or results of a schema, their names with a prefix."""
    return ", ".join(f"Tensor {prefix}{name}" for name in names)
