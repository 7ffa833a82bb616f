"""The custom op ``vision_ttt::ttt_mlp`` behind which every kernel backend stands.

It makes the kernels opaque to torch.compile and torch.export and gives them one analytic backward
(itself an op, so that compiled backward graphs hold it), an autocast rule and a FLOP formula.
A new backend is one more entry in KERNELS.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._backend import AUTO, fastest_backend
from vision_ttt.ops.ttt_linear.autograd import Kernel, autocast_views
from vision_ttt.ops.ttt_linear.scan_order import mini_batches
from vision_ttt.ops.ttt_mlp.dual import (
    checkpoint_interval,
    num_checkpoints,
    ttt_mlp_dual,
    ttt_mlp_dual_backward,
)

KERNELS: dict[str, Kernel] = {  # fastest first
    "dual": Kernel(ttt_mlp_dual, ttt_mlp_dual_backward, lambda q, mini_batch_size: None),
}


def _kernel(backend: str, q: Tensor, mini_batch_size: int) -> Kernel:
    refusals = {
        name: functools.partial(kernel.refusal, q, mini_batch_size)
        for name, kernel in KERNELS.items()
    }
    if backend != AUTO:  # asked for, and checked again: autocast may have changed q's dtype since
        refusals = {backend: refusals[backend]}
    return KERNELS[fastest_backend("ttt_mlp", refusals)]


_STATE = ("w1", "b1", "w2", "b2")
_TENSORS = 11  # q to position_scale


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"Tensor {name}" for name in names)


_INPUTS = (
    f"Tensor q, Tensor k, Tensor v, Tensor eta, {_listed(_STATE)}, "
    "Tensor? ln_weight, Tensor? ln_bias, Tensor? position_scale"
)
_KEPT = tuple(f"kept_{name}" for name in _STATE)
_OPTIONS = "SymInt mini_batch_size, int reverse_heads, float eps"
_GRADIENTS = ("q", "k", "v", "eta", *_STATE, "ln_weight", "ln_bias", "position_scale")


@torch.library.custom_op(
    "vision_ttt::ttt_mlp",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}, bool save_states, str backend) "
    f"-> (Tensor o, {_listed([f'last_{name}' for name in _STATE])}, {_listed(_KEPT)})",
)
def ttt_mlp_op(q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Run a backend's forward; arguments and results as :func:`ttt_mlp_dual`'s."""
    *args, backend = args
    # Kernels choose their own precision; a surrounding autocast must not change their products.
    with torch.autocast(q.device.type, enabled=False):
        return _kernel(backend, q, args[10]).forward(q, *args)


@torch.library.custom_op(
    "vision_ttt::ttt_mlp_backward",
    mutates_args=(),
    schema=f"(Tensor grad_o, {_listed([f'grad_{name}' for name in _STATE])}, {_INPUTS}, "
    f"{_listed(_KEPT)}, {_OPTIONS}, str backend) "
    f"-> ({_listed([f'd{name}' for name in _GRADIENTS])})",
)
def ttt_mlp_backward_op(grad_o: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Run a backend's backward; arguments and results as :func:`ttt_mlp_dual_backward`'s."""
    *args, backend = args
    q, mini_batch_size = args[4], args[19]
    with torch.autocast(grad_o.device.type, enabled=False):
        return _kernel(backend, q, mini_batch_size).backward(grad_o, *args)


@ttt_mlp_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    position_scale: Tensor | None,
    mini_batch_size: int,
    reverse_heads: int,
    eps: float,
    save_states: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    batch, length, heads, dim = q.shape
    hidden = b1.shape[-1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    kept = num_checkpoints(length, dim, mini_batch_size) if save_states else 0
    shapes = (dim, hidden), (hidden,), (hidden, dim), (dim,)
    return (
        q.new_empty(q.shape),
        *(q.new_empty(batch, heads, *shape, dtype=dtype) for shape in shapes),
        *(q.new_empty(kept, batch, heads, *shape, dtype=dtype) for shape in shapes),
    )


@ttt_mlp_backward_op.register_fake
def _(grad_o: Tensor, *args: Any) -> tuple[Tensor, ...]:
    inputs: Sequence[Tensor | None] = args[4 : 4 + _TENSORS]
    return tuple(grad_o.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, mini_batch_size, reverse_heads, eps, save_states, backend = inputs
    kept = output[5:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*tensors, *kept)
    ctx.options = mini_batch_size, reverse_heads, eps, backend
    ctx.states_saved = save_states


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.states_saved:
        raise RuntimeError("vision_ttt::ttt_mlp was called with save_states=False: no backward")
    saved = ctx.saved_tensors
    results = ttt_mlp_backward_op(*grads[:5], *saved, *ctx.options)
    of_inputs = (None if x is None else g for x, g in zip(saved[:_TENSORS], results, strict=True))
    return *of_inputs, None, None, None, None, None


ttt_mlp_op.register_autograd(_backward, setup_context=_setup_context)


def _register_autocast(device_type: str) -> torch.library.Library:
    def rule(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
        views = autocast_views(q, k, v)
        with torch.autocast(device_type, enabled=False):
            return ttt_mlp_op(*views, *args)

    library = torch.library.Library("vision_ttt", "FRAGMENT")
    library.impl("ttt_mlp", rule, f"Autocast{device_type.upper()}")
    return library


# A rule lives as long as its library object.
_AUTOCAST_RULES = [_register_autocast(device_type) for device_type in ("cpu", "cuda", "mps", "xpu")]


def _flops(tokens: int, dim: int, hidden: int, wide: int, narrow: int = 0) -> int:
    """FLOPs of ``wide`` products n·d·h, and ``narrow`` ones n·n·d and n·n·h each."""
    return 2 * tokens * (wide * dim * hidden + narrow * tokens * (dim + hidden))


@register_flop_formula(torch.ops.vision_ttt.ttt_mlp)
def ttt_mlp_flops(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    eta_shape: Sequence[int],
    w1_shape: Sequence[int],
    *args: Any,
    **_: Any,
) -> int:
    """With a hidden width of 4 d: 28 T d² + 10 b T d multiply-adds per head."""
    batch, length, heads, dim = q_shape
    sizes = [stop - start for start, stop in mini_batches(length, args[6])]
    total = sum(_flops(n, dim, w1_shape[-1], wide=7, narrow=2) for n in sizes)
    return batch * heads * total


@register_flop_formula(torch.ops.vision_ttt.ttt_mlp_backward)
def ttt_mlp_backward_flops(grad_o_shape: Sequence[int], *args: Any, **_: Any) -> int:
    """Every mini-batch's products again with their derivatives, and the replay of its state."""
    batch, length, heads, dim = grad_o_shape
    hidden, mini_batch_size = args[8][-1], args[19]
    sizes = [stop - start for start, stop in mini_batches(length, mini_batch_size)]
    interval = checkpoint_interval(dim, mini_batch_size)
    replayed = [n for i, n in enumerate(sizes[:-1]) if (i + 1) % interval]
    total = sum(_flops(n, dim, hidden, wide=19, narrow=6) for n in sizes)
    return batch * heads * (total + sum(_flops(n, dim, hidden, wide=5) for n in replayed))
