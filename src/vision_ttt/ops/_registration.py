"""An op's custom ops: schema, shapes, derivatives, autocast, FLOPs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._backend import AUTO
from vision_ttt.ops._second_derivative import derive_twice

if TYPE_CHECKING:
    from vision_ttt.ops._op import Op

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""The device types with autocast."""


def register_forward(op: Op, schema: str) -> Any:
    """Register ``vision_ttt::NAME``, without a derivative."""

    @torch.library.custom_op(f"vision_ttt::{op.name}", mutates_args=(), schema=schema)
    def forward(*args: Any) -> Any:
        inputs, rest = op.inputs(*args[: op.width]), args[op.width :]
        op.bare_contract.check(inputs)
        keep, requested = (rest[:-1], rest[-1]) if op.backend_at_runtime else (rest, AUTO)
        last_resort = not op.backend_at_runtime and not any(keep)
        backend = op.select_backend(inputs, requested, last_resort=last_resort)
        return op.run(backend.forward, inputs, *keep)

    @forward.register_fake
    def _(*args: Any) -> Any:
        rest = args[op.width :]
        return op.fake(
            op.inputs(*args[: op.width]), *(rest[:-1] if op.backend_at_runtime else rest)
        )

    if op.flops is not None:

        @register_flop_formula(getattr(torch.ops.vision_ttt, op.name))
        def _(*args: Any, **_: Any) -> int:
            return op.flops(op.inputs(*args[: op.width]))

    for device_type in DEVICES if op.autocast else ():
        _register_autocast(op, device_type)
    return forward


def register_backward(op: Op, forward: Any, schema: str) -> None:
    """Register ``vision_ttt::NAME_backward``, the derivative of ``forward``, and its derivative."""
    name = f"{op.name}_backward"

    @torch.library.custom_op(f"vision_ttt::{name}", mutates_args=(), schema=schema)
    def backward(*args: Any) -> Any:
        op.backward_contract.check(args[:-1] if op.backend_at_runtime else args)
        grads, inputs, kept = op.split(args)
        if op.kept is not None and len(kept[-1]) != op.kept(inputs):
            wanted, got = op.kept(inputs), len(kept[-1])
            raise ValueError(f"{name}: needs {wanted} kept states, got {got}")
        backend = op.select_backend(inputs, args[-1] if op.backend_at_runtime else AUTO)
        return op.run(backend.backward, inputs, *grads, *kept)

    @backward.register_fake
    def _(*args: Any) -> Any:
        tensors = args[op.results : op.results + op.tensors]
        like = tensors[0]
        grads = tuple(like.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)
        return grads if len(grads) > 1 else grads[0]

    if op.backward_flops is not None:

        @register_flop_formula(getattr(torch.ops.vision_ttt, name))
        def _(*args: Any, **_: Any) -> int:
            return op.backward_flops(op.split(args)[1])

    def derivative(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if op.kept is not None and not ctx.keeps:
            raise RuntimeError(
                f"vision_ttt::{op.name} was called without saving tensors for the backward pass"
            )
        saved = ctx.saved_tensors  # read once: activation checkpointing allows a single read
        gradients = backward(*grads[: op.results], *saved, *ctx.options, *ctx.backend)
        pairs = zip(saved[: op.tensors], gradients if op.tensors > 1 else (gradients,), strict=True)
        return *(None if x is None else grad for x, grad in pairs), *[None] * ctx.others

    forward.register_autograd(derivative, setup_context=partial(_save, op))
    derive_twice(op, backward)


def register_composed_backward(op: Op, forward: Any) -> None:
    """Register ``op.composed_backward``, of differentiable operations, as the derivative."""

    def derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = op.inputs(*ctx.saved_tensors[: op.tensors], *ctx.options)
        return *op.composed_backward(inputs, grad), *[None] * ctx.others

    forward.register_autograd(derivative, setup_context=partial(_save, op))


def _save(op: Op, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save a call's tensors, its results for the backward pass, and its options."""
    kept = () if op.kept is None else output[op.results :]
    if kept:
        ctx.mark_non_differentiable(*kept)
        # The kept tensors have no gradients, for which zeros of their size would be written.
        ctx.set_materialize_grads(op.results > 1)
        ctx.keeps = inputs[op.width]
    ctx.save_for_backward(*inputs[: op.tensors], *kept)
    ctx.options = inputs[op.tensors : op.width]
    ctx.backend = inputs[-1:] if op.backend_at_runtime else ()
    ctx.others = len(inputs) - op.tensors


_AUTOCAST_RULES: list[torch.library.Library] = []  # a rule lives as long as its library object


def _register_autocast(op: Op, device_type: str) -> None:
    def rule(*args: Any) -> Any:
        inputs = op.cast(op.inputs(*args[: op.width]))
        with torch.autocast(device_type, enabled=False):
            return op.forward_op(*inputs, *args[op.width :])

    library = torch.library.Library("vision_ttt", "FRAGMENT")
    library.impl(op.name, rule, f"Autocast{device_type.upper()}")
    _AUTOCAST_RULES.append(library)
