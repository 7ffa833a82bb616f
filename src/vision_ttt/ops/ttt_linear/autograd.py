"""The custom op ``vision_ttt::ttt_linear`` behind which every kernel backend stands.

It makes the kernels opaque to torch.compile and torch.export and gives them one analytic backward
(itself an op, so that compiled backward graphs hold it), an autocast rule and a FLOP formula.
A new backend is one more entry in KERNELS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._backend import AUTO, fastest_backend
from vision_ttt.ops._native import warn_if_missing
from vision_ttt.ops.ttt_linear import cpu, triton_backend
from vision_ttt.ops.ttt_linear.dual import (
    checkpoint_interval,
    num_checkpoints,
    ttt_linear_dual,
    ttt_linear_dual_backward,
)
from vision_ttt.ops.ttt_linear.scan_order import mini_batches


class Kernel(NamedTuple):
    """A backend: both passes, and why it cannot serve q with mini-batches of b (None if it can)."""

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]
    refusal: Callable[[Tensor, int], str | None]


KERNELS: dict[str, Kernel] = {  # fastest first
    "cpu": Kernel(cpu.ttt_linear_cpu, cpu.ttt_linear_cpu_backward, cpu.refusal),
    "triton": Kernel(
        triton_backend.ttt_linear_triton,
        triton_backend.ttt_linear_triton_backward,
        triton_backend.refusal,
    ),
    "dual": Kernel(ttt_linear_dual, ttt_linear_dual_backward, lambda q, mini_batch_size: None),
}


def _kernel(backend: str, q: Tensor, mini_batch_size: int) -> Kernel:
    refusals = {
        name: functools.partial(kernel.refusal, q, mini_batch_size)
        for name, kernel in KERNELS.items()
    }
    if backend != AUTO:  # asked for, and checked again: autocast may have changed q's dtype since
        refusals = {backend: refusals[backend]}
    elif q.device.type == "cpu":  # there Triton's kernels are interpreted, for tests: by name only
        refusals.pop("triton", None)
    backend = fastest_backend("ttt_linear", refusals)
    if backend == "dual" and q.device.type == "cpu":
        warn_if_missing()
    return KERNELS[backend]


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor eta, Tensor w0, Tensor b0, "
    "Tensor? ln_weight, Tensor? ln_bias, Tensor? position_scale"
)
_OPTIONS = "SymInt mini_batch_size, int reverse_heads, float eps"


@torch.library.custom_op(
    "vision_ttt::ttt_linear",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}, bool save_states, str backend) "
    "-> (Tensor o, Tensor w, Tensor b, Tensor kept_w, Tensor kept_b)",
)
def ttt_linear_op(q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Run a backend's forward; arguments and results as :func:`ttt_linear_dual`'s."""
    *args, backend = args
    # Kernels choose their own precision; a surrounding autocast must not change their products.
    with torch.autocast(q.device.type, enabled=False):
        return _kernel(backend, q, args[8]).forward(q, *args)


@torch.library.custom_op(
    "vision_ttt::ttt_linear_backward",
    mutates_args=(),
    schema=f"(Tensor grad_o, Tensor grad_w, Tensor grad_b, {_INPUTS}, Tensor kept_w, "
    f"Tensor kept_b, {_OPTIONS}, str backend) -> (Tensor dq, Tensor dk, Tensor dv, Tensor deta, "
    "Tensor dw0, Tensor db0, Tensor dln_weight, Tensor dln_bias, Tensor dposition_scale)",
)
def ttt_linear_backward_op(grad_o: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Run a backend's backward; arguments and results as :func:`ttt_linear_dual_backward`'s."""
    *args, backend = args
    with torch.autocast(grad_o.device.type, enabled=False):
        return _kernel(backend, args[2], args[13]).backward(grad_o, *args)


@ttt_linear_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w0: Tensor,
    b0: Tensor,
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
    dtype = torch.promote_types(q.dtype, torch.float32)
    kept = num_checkpoints(length, dim, mini_batch_size) if save_states else 0
    return (
        q.new_empty(q.shape),
        q.new_empty(batch, heads, dim, dim, dtype=dtype),
        q.new_empty(batch, heads, dim, dtype=dtype),
        q.new_empty(kept, batch, heads, dim, dim, dtype=dtype),
        q.new_empty(kept, batch, heads, dim, dtype=dtype),
    )


@ttt_linear_backward_op.register_fake
def _(grad_o: Tensor, grad_w: Tensor, grad_b: Tensor, *args: Any) -> tuple[Tensor, ...]:
    inputs: Sequence[Tensor | None] = args[:9]
    return tuple(grad_o.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, mini_batch_size, reverse_heads, eps, save_states, backend = inputs
    *_, kept_w, kept_b = output
    ctx.mark_non_differentiable(kept_w, kept_b)
    ctx.save_for_backward(*tensors, kept_w, kept_b)
    ctx.options = mini_batch_size, reverse_heads, eps, backend
    ctx.states_saved = save_states


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.states_saved:
        raise RuntimeError("vision_ttt::ttt_linear was called with save_states=False: no backward")
    saved = ctx.saved_tensors
    results = ttt_linear_backward_op(*grads[:3], *saved, *ctx.options)
    of_inputs = (None if x is None else g for x, g in zip(saved[:9], results, strict=True))
    return *of_inputs, None, None, None, None, None


ttt_linear_op.register_autograd(_backward, setup_context=_setup_context)


def autocast_views(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast the three views to the autocast dtype; learning rate, state and norm stay as they are.

    Float64 is left alone, as PyTorch's own autocast rules do.
    """
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _register_autocast(device_type: str) -> torch.library.Library:
    def rule(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
        views = autocast_views(q, k, v)
        with torch.autocast(device_type, enabled=False):
            return ttt_linear_op(*views, *args)

    library = torch.library.Library("vision_ttt", "FRAGMENT")
    library.impl("ttt_linear", rule, f"Autocast{device_type.upper()}")
    return library


# A rule lives as long as its library object.
_AUTOCAST_RULES = [_register_autocast(device_type) for device_type in ("cpu", "cuda", "mps", "xpu")]


def _flops(tokens: int, dim: int, wide: int, narrow: int = 0) -> int:
    """FLOPs of ``wide`` products n·d·d and ``narrow`` ones n·n·d in a mini-batch of n tokens."""
    return 2 * tokens * dim * (wide * dim + narrow * tokens)


@register_flop_formula(torch.ops.vision_ttt.ttt_linear)
def ttt_linear_flops(q_shape: Sequence[int], *args: Any, **_: Any) -> int:
    """Vision-TTT's Eq. 13, the op's share: 3 T d² + 2 b T d multiply-adds per head."""
    batch, length, heads, dim = q_shape
    sizes = [stop - start for start, stop in mini_batches(length, args[8])]
    return batch * heads * sum(_flops(n, dim, wide=3, narrow=2) for n in sizes)


@register_flop_formula(torch.ops.vision_ttt.ttt_linear_backward)
def ttt_linear_backward_flops(grad_o_shape: Sequence[int], *args: Any, **_: Any) -> int:
    """Every mini-batch's products again with their derivatives, and the replay of its state."""
    batch, length, heads, dim = grad_o_shape
    mini_batch_size = args[13]
    sizes = [stop - start for start, stop in mini_batches(length, mini_batch_size)]
    interval = checkpoint_interval(dim, mini_batch_size)
    replayed = [n for i, n in enumerate(sizes[:-1]) if (i + 1) % interval]
    total = sum(_flops(n, dim, wide=8, narrow=6) for n in sizes)
    return batch * heads * (total + sum(_flops(n, dim, wide=2) for n in replayed))
