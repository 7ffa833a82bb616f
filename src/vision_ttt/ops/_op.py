"""What every op is made of: its definition, its custom ops, and the backends that may serve.

A folder per op, each with the same files: ``contract.py`` (the inputs and what is asked of them),
``definition.py`` (the specification, in plain PyTorch), a file per backend, and ``op.py`` (the
public function, and the :class:`Op`). :mod:`vision_ttt.ops._table` lists all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops import _backend
from vision_ttt.ops._backend import AUTO, is_transformed, requested_backend
from vision_ttt.ops._contract import Contract
from vision_ttt.ops._direct import may_go_straight
from vision_ttt.ops._native import warn_if_missing
from vision_ttt.ops._registration import (
    register_backward,
    register_composed_backward,
    register_forward,
)

REFERENCE = "reference"
"""The backend of every op that is its definition, differentiated by autograd."""
PYTORCH = ("dual", REFERENCE)
"""What asks for PyTorch's own operations: an op without matrix products has one form of them."""
TRANSFORMED = "torch.func transforms and forward-mode derivatives need the backend 'reference'"


class Backend(NamedTuple):
    """One way to compute an op.

    ``forward`` takes the inputs, and of ops that keep work for the backward pass whether to; it
    returns the op's results. ``backward`` takes the inputs, the gradients of the results and what
    was kept; it returns a gradient per tensor of the inputs, empty for those that are None.
    ``refusal`` says in a few words why it cannot serve the inputs, or None if it can. ``alone``
    takes the inputs and how many results are wanted and returns as many, for calls whose gradient
    nobody asks for, where that is less work than ``forward``.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    refusal: Callable[[Any], str | None]
    alone: Callable[[Any], Any] | None = None


class Op:
    """An op: called with its inputs, it chooses a backend by them and runs it.

    Behind ``vision_ttt::NAME`` stand all backends; calls that the dispatcher would only hand on go
    past it. It is opaque to torch.compile and torch.export,
    has one backward pass (``vision_ttt::NAME_backward``, so that compiled backward graphs hold it),
    and further derivatives by its definition.

    Args:
        name: the op's public name.
        inputs: a named tuple, the tensors first; the custom op takes its fields one by one.
        contract: what the public function asks of them.
        definition: inputs → results, by differentiable operations: the specification.
        backends: by name, fastest first.
        fake: inputs, and ``keep`` where the op keeps work → results without content.
        schema: of ``vision_ttt::NAME``. Behind the inputs it has a bool where the op keeps work for
            the backward pass, and last a ``str backend`` where programs that hold it choose their
            backend when they run.
        backward_schema: of ``vision_ttt::NAME_backward``: gradients, tensors, what was kept,
            options, and the backend.
        backward_contract: what the latter asks for.
        composed_backward: (inputs, gradient) → a gradient per tensor, by differentiable operations,
            in place of a backward op.
        bare_contract: what ``vision_ttt::NAME`` asks for, where that is less than the contract.
        results: how many results have a gradient; those behind them are kept for the backward pass.
        kept: inputs → the length of the first axis of the last that is kept.
        composition: inputs → results by other ops one after the other, each with backends of its
            own: for what no backend of this op serves, and for whatever else is asked for.
        autocast: the tensors that autocast casts; where none is, it leaves the call to PyTorch.
        exported: the op for programs that run without this package, if it is not the definition.
        flops, backward_flops: inputs, with shapes for tensors → floating point operations.
    """

    def __init__(
        self,
        name: str,
        inputs: type[Any],
        contract: Contract,
        definition: Callable[[Any], Any],
        backends: Mapping[str, Backend],
        fake: Callable[..., Any],
        *,
        schema: str,
        backward_schema: str | None = None,
        backward_contract: Contract | None = None,
        composed_backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
        bare_contract: Contract | None = None,
        results: int = 1,
        kept: Callable[[Any], int] | None = None,
        composition: Callable[[Any], Any] | None = None,
        autocast: tuple[str, ...] = (),
        exported: Callable[[Any], Any] | None = None,
        flops: Callable[[Any], int] | None = None,
        backward_flops: Callable[[Any], int] | None = None,
    ) -> None:
        self.name, self.inputs, self.definition, self.fake = name, inputs, definition, fake
        self.contract, self.bare_contract = contract, bare_contract or contract
        self.backward_contract, self.composed_backward = backward_contract, composed_backward
        self.backends = dict(backends)
        self.results, self.kept, self.autocast = results, kept, autocast
        self.composition = composition
        self.exported = exported or composition or definition
        self.flops, self.backward_flops = flops, backward_flops
        self.width, self.tensors = len(contract.names), len(contract.tensors)
        self.late = "str backend" in schema
        """Whether a call that asks for nobody chooses its backend when the custom op runs."""
        self._last = Backend(self._without_backend, None, lambda _: None)
        forward = register_forward(self, schema)
        if backward_schema is not None:
            register_backward(self, forward, backward_schema)
        elif composed_backward is not None:
            register_composed_backward(self, forward)
        self.forward_op = getattr(torch.ops.vision_ttt, name).default
        self.backward_op = None
        if backward_schema is not None:
            self.backward_op = getattr(torch.ops.vision_ttt, f"{name}_backward").default

    def __call__(self, inputs: Any, backend: str | None = None, wanted: int | None = None) -> Any:
        """The results, by the backend asked for or else the fastest that serves.

        Of several results the first ``wanted`` may be all that there are.

        Raises:
            TypeError, ValueError: the inputs do not keep to the contract.
            ValueError: the backend asked for is unknown or cannot serve.
        """
        self.contract.check(inputs)
        if backend is None and _backend.override() is None and may_go_straight(inputs):
            fastest = self._fastest(inputs)
            if fastest is not None:
                return self._run_alone(fastest, inputs, wanted or self.results)
        if self.autocast and torch.is_autocast_enabled(_autocast_kind(inputs[0])):
            inputs = self.cast(inputs)
        if _backend.exporting_onnx():
            return self.exported(inputs)
        name = self._choose(inputs, backend)
        if name != AUTO and name not in self.backends:
            return self._define(inputs)
        if self.kept is None:
            return self.forward_op(*inputs)
        needs_grad = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        keep = torch.is_grad_enabled() and needs_grad
        results = self.forward_op(*inputs, keep, *((name,) if self.late else ()))
        return self._without_kept(results)

    def _run_alone(self, backend: Backend, inputs: Any, wanted: int) -> Any:
        """What a call gives whose gradient nobody asks for."""
        if backend.alone is not None:
            return backend.alone(inputs, wanted)
        if self.kept is None:
            return backend.forward(inputs)
        return self._without_kept(backend.forward(inputs, False))

    def _without_kept(self, results: tuple[Tensor, ...]) -> Any:
        return results[: self.results] if self.results > 1 else results[0]

    def _fastest(self, inputs: Any) -> Backend | None:
        """The first backend that can serve, of those that come in without being asked for."""
        for name in self._unasked(inputs[0]):
            if self.backends[name].refusal(inputs) is None:
                if name == "dual" and inputs[0].is_cpu:
                    warn_if_missing()
                return self.backends[name]
        return None

    def run(self, function: Callable[..., Any], inputs: Any, *others: Any) -> Any:
        """Call a backend's function. Within an op that autocast casts for it rounds nothing."""
        kind = inputs[0].device.type
        if self.autocast and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return function(inputs, *others)
        return function(inputs, *others)

    def choose(self, inputs: Any, backend: str | None = None) -> str:
        """Name the backend of a call: asked for by it or by an override, or the fastest.

        AUTO where the fastest is found when the custom op runs.

        Raises:
            ValueError: the backend asked for is unknown or cannot serve.
        """
        return REFERENCE if _backend.exporting_onnx() else self._choose(inputs, backend)

    def _choose(self, inputs: Any, backend: str | None) -> str:
        if self.composition is None:
            if backend or _backend.override():
                return requested_backend(
                    self.name,
                    backend,
                    self.names(),
                    lambda name: self._public_refusal(name, inputs),
                )
            if self.late:
                return REFERENCE if is_transformed() else AUTO
        elif _backend.override() not in (None, *self.backends):
            return REFERENCE
        if is_transformed():
            return REFERENCE
        left_to_pytorch = not self.autocast and torch.is_autocast_enabled("cpu")
        for name in self._unasked(inputs[0]):
            if self.backends[name].refusal(inputs) is None and not (
                left_to_pytorch and name == "cpu"
            ):
                return name
        return REFERENCE

    def names(self) -> list[str]:
        """Whatever backend may be asked for."""
        return [*self.backends, *(name for name in PYTORCH if name not in self.backends)]

    def refusal(self, name: str, inputs: Any) -> str | None:
        """Why a backend cannot serve the inputs, in a few words, or None if it can."""
        return self.backends[name].refusal(inputs) if name in self.backends else None

    def _public_refusal(self, name: str, inputs: Any) -> str | None:
        """The same of a call here and now."""
        if name not in self.backends:
            return None
        if is_transformed():
            return TRANSFORMED
        if name == "cpu" and not self.autocast and torch.is_autocast_enabled("cpu"):
            return "autocast is on, which leaves the op to PyTorch"
        return self.backends[name].refusal(inputs)

    def _unasked(self, x: Tensor) -> Iterable[str]:
        """Backends that come in without being asked for: on a CPU Triton would be interpreted."""
        return (name for name in self.backends if name != "triton" or not x.is_cpu)

    def serving(self, inputs: Any, asked: str = AUTO, *, last_resort: bool = False) -> Backend:
        """The backend asked for, or the first that can serve. Called when a custom op runs.

        Where the schema names no backend, an override does, if it can serve. With ``last_resort``
        PyTorch's operations are there to fall back on: a program may be exported where a kernel
        serves and run where it does not.

        Raises:
            ValueError: the one asked for, or every one, refuses.
        """
        override = None if self.late else _backend.override()
        if override in self.backends and self.refusal(override, inputs) is None:
            return self.backends[override]
        if asked != AUTO and asked not in self.backends:
            raise ValueError(
                f"{self.name}: unknown backend {asked!r}; available: {sorted(self.backends)}"
            )
        # Also one asked for is checked again: autocast may have changed a dtype since.
        names = self._unasked(inputs[0]) if asked == AUTO else (asked,)
        reasons = {}
        for name in names:
            reason = self.backends[name].refusal(inputs)
            if reason is None:
                if name == "dual" and inputs[0].is_cpu:
                    warn_if_missing()
                return self.backends[name]
            reasons[name] = reason
        if last_resort:
            return self._last
        raise ValueError(f"{self.name}: no backend can serve this call: {reasons}")

    def serves(self, inputs: Any) -> bool:
        """Whether a kernel takes the inputs, as a call that asks for nobody would have it."""
        return any(self.refusal(name, inputs) is None for name in self._unasked(inputs[0]))

    def split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        """A backward op's arguments: gradients, inputs, and what was kept."""
        end = len(args) - self.late
        options = end - (self.width - self.tensors)
        tensors, kept = self.results, self.results + self.tensors
        inputs = self.inputs(*args[tensors:kept], *args[options:end])
        return args[:tensors], inputs, args[kept:options]

    def cast(self, inputs: Any) -> Any:
        """The inputs as autocast has them. Float64 is left alone, as by PyTorch's own rules."""
        dtype = torch.get_autocast_dtype(_autocast_kind(inputs[0]))
        given = {name: getattr(inputs, name) for name in self.autocast}
        return inputs._replace(
            **{
                name: x if x is None or x.dtype == torch.float64 else x.to(dtype)
                for name, x in given.items()
            }
        )

    def _without_backend(self, inputs: Any, keep: bool = False) -> Any:
        out = (self.composition or self.definition)(inputs).contiguous()
        return out if self.kept is None else (out, *self.fake(inputs, keep)[1:])

    def _define(self, inputs: Any) -> Any:
        if not self.autocast:
            return (self.composition or self.definition)(inputs)
        with torch.autocast(_autocast_kind(inputs[0]), enabled=False):
            return self.definition(inputs)


def _autocast_kind(x: Tensor) -> str:
    """The device type whose autocast counts for x: one without content knows of none."""
    return "cpu" if x.is_meta else x.device.type
