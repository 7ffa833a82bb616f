"""What the ops that learn along the tokens share: custom ops, and the way of a call to a backend.

Behind the custom op ``vision_ttt::NAME`` stands every kernel backend of the op. It makes the
kernels opaque to torch.compile and torch.export and gives them one analytic backward (itself an op,
so that compiled backward graphs hold it) and an autocast rule; FLOP formulas are each op's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops._backend import AUTO, fastest_backend, is_transformed, requested_backend
from vision_ttt.ops._learner_contract import LearnerContracts
from vision_ttt.ops._native import warn_if_missing
from vision_ttt.ops._second_derivative import derive_twice

Tensors = Sequence[Tensor | None]


class Kernel(NamedTuple):
    """A backend: both passes, and why it cannot serve q with mini-batches of b (None if it can)."""

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]
    refusal: Callable[[Tensor, int], str | None]


def define_learner_ops(
    name: str,
    state: Sequence[str],
    kernels: Callable[[], Mapping[str, Kernel]],
    num_checkpoints: Callable[[int, int, int], int],
    contracts: LearnerContracts,
    reference: Callable[..., tuple[Tensor, ...]],
) -> tuple[Any, Any]:
    """Register ``vision_ttt::NAME`` and ``vision_ttt::NAME_backward``.

    The first takes q, k, v, eta, the initial state, ln_weight, ln_bias, position_scale (any of
    these three may be None), mini_batch_size, reverse_heads, eps, save_states and backend; it
    returns o, the last state and the kept states. The second takes the gradients of o and of the
    last state, the first's tensors, the kept states, mini_batch_size, reverse_heads, eps and
    backend; it returns a gradient per tensor, empty where there was none.

    Args:
        name: the op's.
        state: names of the state's tensors: a weight and a bias of every layer.
        kernels: returns the backends by name, fastest first.
        num_checkpoints: (T, d, b) → how many states a forward pass keeps.
        contracts: what the ops ask of their arguments.
        reference: the definition; arguments as the first op's without save_states and backend.
    """
    names = ("q", "k", "v", "eta", *state, "ln_weight", "ln_bias", "position_scale")
    ranks = (2, 1) * (len(state) // 2)
    results, count = 1 + len(state), len(names)
    optional = names[-3:]
    inputs = ", ".join(f"Tensor{'?' if x in optional else ''} {x}" for x in names)
    options = "SymInt mini_batch_size, int reverse_heads, float eps"
    kept = _tensors("kept", state)

    def kernel(backend: str, q: Tensor, mini_batch_size: int) -> Kernel:
        return _serving(name, kernels(), backend, q, mini_batch_size)

    @torch.library.custom_op(
        f"vision_ttt::{name}",
        mutates_args=(),
        schema=f"({inputs}, {options}, bool save_states, str backend) "
        f"-> (Tensor o, {_tensors('last', state)}, {kept})",
    )
    def op(q: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *args, backend = args
        contracts.forward.check(dict(zip(contracts.forward.names, (q, *args), strict=False)))
        # Kernels choose their own precision; a surrounding autocast must not change their products.
        with torch.autocast(q.device.type, enabled=False):
            return kernel(backend, q, args[count - 1]).forward(q, *args)

    @torch.library.custom_op(
        f"vision_ttt::{name}_backward",
        mutates_args=(),
        schema=f"(Tensor grad_o, {_tensors('grad', state)}, {inputs}, {kept}, {options}, "
        f"str backend) -> ({_tensors('d', names)})",
    )
    def backward_op(grad_o: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *args, backend = args
        contract, arguments = contracts.backward, (grad_o, *args)
        contract.check(dict(zip(contract.names, arguments, strict=True)))
        q, mini_batch_size, kept = args[results - 1], args[-3], args[-4]
        wanted = num_checkpoints(q.shape[1], q.shape[3], mini_batch_size)
        if len(kept) != wanted:
            raise ValueError(f"{contract.op}: needs {wanted} kept states, got {len(kept)}")
        with torch.autocast(grad_o.device.type, enabled=False):
            return kernel(backend, q, mini_batch_size).backward(grad_o, *args)

    @op.register_fake
    def _(q: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *tensors, mini_batch_size, _, _, save_states, _ = args
        batch, length, heads, dim = q.shape
        dtype = torch.promote_types(q.dtype, torch.float32)
        places = num_checkpoints(length, dim, mini_batch_size) if save_states else 0
        initial = tensors[3 : 3 + len(state)]
        shapes = [x.shape[-rank:] for x, rank in zip(initial, ranks, strict=True)]
        return (
            q.new_empty(q.shape),
            *(q.new_empty(batch, heads, *shape, dtype=dtype) for shape in shapes),
            *(q.new_empty(places, batch, heads, *shape, dtype=dtype) for shape in shapes),
        )

    @backward_op.register_fake
    def _(grad_o: Tensor, *args: Any) -> tuple[Tensor, ...]:
        tensors: Tensors = args[results - 1 : results - 1 + count]
        return tuple(grad_o.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, mini_batch_size, reverse_heads, eps, save_states, backend = inputs
        states = output[results:]
        ctx.mark_non_differentiable(*states)
        ctx.save_for_backward(*tensors, *states)
        ctx.options = mini_batch_size, reverse_heads, eps, backend
        ctx.states_saved = save_states

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.states_saved:
            raise RuntimeError(f"vision_ttt::{name} was called with save_states=False: no backward")
        saved = ctx.saved_tensors
        gradients = backward_op(*grads[:results], *saved, *ctx.options)
        of_inputs = (
            None if x is None else g for x, g in zip(saved[:count], gradients, strict=True)
        )
        return *of_inputs, None, None, None, None, None

    def definition(*args: Any) -> tuple[Tensor, ...]:
        *args, _ = args
        return reference(*args)

    op.register_autograd(backward, setup_context=setup_context)
    derive_twice(backward_op, definition, tensors=count, results=results, unused=len(state))
    for device_type in ("cpu", "cuda", "mps", "xpu"):
        _register_autocast(name, op, device_type)
    return op, backward_op


def _tensors(prefix: str, names: Sequence[str]) -> str:
    """Tensor arguments or results of a schema, called PREFIX_NAME each, or dNAME."""
    joint = "" if prefix == "d" else "_"
    return ", ".join(f"Tensor {prefix}{joint}{name}" for name in names)


def _serving(
    name: str, kernels: Mapping[str, Kernel], backend: str, q: Tensor, mini_batch_size: int
) -> Kernel:
    """The backend asked for, or the fastest that can serve."""
    refusals = {
        key: functools.partial(kernel.refusal, q, mini_batch_size)
        for key, kernel in kernels.items()
    }
    if backend not in (AUTO, *refusals):
        raise ValueError(f"{name}: unknown backend {backend!r}; available: {sorted(refusals)}")
    if backend != AUTO:  # asked for, and checked again: autocast may have changed q's dtype since
        refusals = {backend: refusals[backend]}
    elif q.device.type == "cpu":  # there Triton's kernels are interpreted, for tests: by name only
        refusals.pop("triton", None)
    backend = fastest_backend(name, refusals)
    if backend == "dual" and q.device.type == "cpu":
        warn_if_missing()
    return kernels[backend]


def autocast_views(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast the three views to the autocast dtype; learning rate, state and norm stay as they are.

    Float64 is left alone, as PyTorch's own autocast rules do.
    """
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


_AUTOCAST_RULES: list[torch.library.Library] = []  # a rule lives as long as its library object


def _register_autocast(name: str, op: Any, device_type: str) -> None:
    def rule(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
        views = autocast_views(q, k, v)
        with torch.autocast(device_type, enabled=False):
            return op(*views, *args)

    library = torch.library.Library("vision_ttt", "FRAGMENT")
    library.impl(name, rule, f"Autocast{device_type.upper()}")
    _AUTOCAST_RULES.append(library)


def _refusal(kernel: Kernel, q: Tensor, mini_batch_size: int) -> str | None:
    if is_transformed():
        return "torch.func transforms and forward-mode derivatives need the backend 'reference'"
    return kernel.refusal(q, mini_batch_size)


def run_learner(
    name: str,
    op: Callable[..., tuple[Tensor, ...]],
    kernels: Mapping[str, Kernel],
    reference: Callable[..., tuple[Tensor, ...]],
    tensors: Tensors,
    *,
    mini_batch_size: int,
    reverse_heads: int,
    eps: float,
    backend: str | None,
) -> tuple[Tensor, ...]:
    """o and the last state, by the backend asked for or, with None, the fastest that serves.

    Args:
        name: the op's public name.
        op: its custom op, see :func:`define_learner_ops`.
        kernels: its backends but the reference.
        reference: its definition; arguments as the op's without save_states and backend.
        tensors: q, k, v, eta, the initial state, ln_weight, ln_bias, position_scale, checked.

    Raises:
        ValueError: the backend asked for is unknown or cannot serve.
    """
    q = tensors[0]
    refusals = {
        key: functools.partial(_refusal, kernel, q, mini_batch_size)
        for key, kernel in kernels.items()
    }
    backend = requested_backend(name, backend, refusals | {"reference": lambda: None})
    if backend == AUTO and is_transformed():
        backend = "reference"
    if backend != "reference":
        needs_grad = any(x is not None and x.requires_grad for x in tensors)
        save_states = torch.is_grad_enabled() and needs_grad
        results = op(*tensors, mini_batch_size, reverse_heads, eps, save_states, backend)
        return results[: 1 + len(results) // 2]
    device_type = "cpu" if q.device.type == "meta" else q.device.type
    if torch.is_autocast_enabled(device_type):
        tensors = (*autocast_views(*tensors[:3]), *tensors[3:])
    with torch.autocast(device_type, enabled=False):
        return reference(*tensors, mini_batch_size, reverse_heads, eps)
