"""The parts of every op: its definition, its custom ops and its backends.

Every op has a folder with the same files: ``contract.py`` (the inputs and the checks on them),
``definition.py`` (the specification, in plain PyTorch), a file per backend, and ``op.py`` (the
public function, and the :class:`Op`). :mod:`vision_ttt.ops._table` lists all ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_ttt.ops import _backend, _native
from vision_ttt.ops._backend import (
    AUTO,
    PYTORCH,
    autocast_kind,
    is_transformed,
    requested_backend,
)
from vision_ttt.ops._contract import MOST_SIGNATURES, Contract
from vision_ttt.ops._dispatcher_bypass import are_plain, is_plain_mode, needs_gradient, signature
from vision_ttt.ops._native import warn_if_missing
from vision_ttt.ops._recorded_call import recorded_call
from vision_ttt.ops._registration import (
    register_backward,
    register_composed_backward,
    register_forward,
)

REFERENCE = "reference"
"""The backend that every op has: its definition, differentiated by autograd."""
TRANSFORMED = "torch.func transforms and forward-mode derivatives need the backend 'reference'"
"""The reason why a backend other than the reference refuses a transformed call."""


class Backend(NamedTuple):
    """One implementation of an op.

    ``forward``: (inputs) → the op's results. An op that saves tensors for the backward pass passes
    a second argument: whether to save them.
    ``backward``: (inputs, gradients of the results, saved tensors) → a gradient per tensor of the
    inputs, empty for those that are None.
    ``refusal``: (inputs) → the reason why the backend does not support them, None if it does.
    ``inference``: (inputs, n) → the first n results, for calls without a gradient. Set only where
    it is less work than ``forward``.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    refusal: Callable[[Any], str | None]
    inference: Callable[[Any, int], Any] | None = None


class Op:
    """An op: a call selects a backend by its inputs and runs it.

    The custom op ``vision_ttt::NAME`` covers all backends. Calls that need nothing of PyTorch's
    dispatcher, or only autograd, bypass it. The custom op is opaque to torch.compile and
    torch.export. Its backward pass is a custom op too (``vision_ttt::NAME_backward``), so that
    compiled backward graphs contain it. Higher derivatives are those of the definition.

    Args:
        name: the op's public name.
        inputs: a named tuple, the tensors first. The custom op's arguments are its fields. It has
            methods, no properties: torch.compile of some PyTorch versions does not trace those.
        contract: the checks of the public function.
        definition: inputs → results, by differentiable operations: the specification.
        backends: name → backend, fastest first.
        fake: inputs, and ``keep`` where the op saves tensors → results without content.
        schema: of ``vision_ttt::NAME``. After the inputs it has a bool where the op saves tensors
            for the backward pass, and last a ``str backend`` where the backend is selected when
            the custom op runs.
        backward_schema: of ``vision_ttt::NAME_backward``: gradients, tensors, saved tensors,
            options, and the backend.
        backward_contract: the checks of ``vision_ttt::NAME_backward``.
        composed_backward: (inputs, gradient) → a gradient per tensor, by differentiable operations.
            It replaces a backward op.
        bare_contract: the checks of ``vision_ttt::NAME``, where they are fewer than the contract's.
        results: the number of results with a gradient. Further results are saved for the backward
            pass.
        kept: inputs → the length of the first axis of the last saved tensor.
        composition: inputs → results by a sequence of other ops, each with backends of its own. It
            runs the calls that no backend of this op supports.
        autocast: names of the tensors that autocast casts. Without any, an autocast call runs in
            PyTorch's operations.
        exported: inputs → results in programs that run without this package. The default is the
            composition or the definition.
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
        self.backend_at_runtime = "str backend" in schema
        """Whether a call without a requested backend selects one when the custom op runs."""
        self._recorded = recorded_call(name)
        self._served: dict[tuple[Any, ...], str] = {}
        self._last_resort = Backend(self._without_backend, None, lambda _: None)
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
        """Compute the results by the requested backend, or by the fastest that supports the inputs.

        A call without a gradient may return only the first ``wanted`` results.

        Raises:
            TypeError, ValueError: the inputs violate the contract.
            ValueError: the requested backend is unknown or does not support the inputs.
        """
        if _backend.override() is None and is_plain_mode():
            chosen = self._for_plain_call(inputs, backend)
            if chosen is not None and not needs_gradient(inputs):
                return self._run_inference(chosen, inputs, wanted or self.results)
            if chosen is not None and chosen.backward is not None:
                return self._recorded.apply(self, chosen, backend or AUTO, *inputs)
        else:
            self.contract.check(inputs)
        if self.autocast and torch.is_autocast_enabled(autocast_kind(inputs[0])):
            inputs = self.cast(inputs)
        if _backend.exporting_onnx():
            return self.exported(inputs)
        name = self._choose(inputs, backend)
        if name != AUTO and name not in self.backends:
            return self._by_definition(inputs)
        if self.kept is None:
            return self.forward_op(*inputs)
        keep = needs_gradient(inputs)
        results = self.forward_op(*inputs, keep, *((name,) if self.backend_at_runtime else ()))
        return self._without_kept(results)

    def _run_inference(self, backend: Backend, inputs: Any, wanted: int) -> Any:
        """The results of a call without a gradient."""
        if backend.inference is not None:
            return backend.inference(inputs, wanted)
        if self.kept is None:
            return backend.forward(inputs)
        return self._without_kept(backend.forward(inputs, False))

    def _without_kept(self, results: tuple[Tensor, ...]) -> Any:
        return results[: self.results] if self.results > 1 else results[0]

    def _for_plain_call(self, inputs: Any, requested: str | None) -> Backend | None:
        """Check the inputs, and return the backend of a plain call, None if it is not one.

        The calls of a model repeat, and for small images the checks would take longer than the
        kernels: a call of a signature that was served before is checked for its memory alone.
        """
        try:
            key = (requested, _native.LIBRARY, *signature(inputs))
            name = self._served.get(key)
        except TypeError:  # an argument has no hash, such as a symbolic size
            key, name = None, None
        if name is not None:
            self.contract.check_memory(inputs)
            return self.backends[name]
        self.contract.check(inputs)
        name = self._first_to_serve(inputs, requested) if are_plain(inputs) else None
        if name is None:
            return None
        if key is not None:
            if len(self._served) == MOST_SIGNATURES:
                self._served.clear()
            self._served[key] = name
        return self.backends[name]

    def _first_to_serve(self, inputs: Any, requested: str | None) -> str | None:
        """The requested backend, or the first of those that need no request, if it can serve."""
        if requested is not None:
            known = requested in self.backends and self.refusal(requested, inputs) is None
            return requested if known else None
        for name in self._default_names(inputs[0]):
            if self.backends[name].refusal(inputs) is None:
                if name == "dual" and inputs[0].is_cpu:
                    warn_if_missing()
                return name
        return None

    def run(self, function: Callable[..., Any], inputs: Any, *others: Any) -> Any:
        """Call a backend's function, with autocast off for an op that casts its own tensors."""
        kind = inputs[0].device.type
        if self.autocast and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return function(inputs, *others)
        return function(inputs, *others)

    def choose(self, inputs: Any, backend: str | None = None) -> str:
        """Return the name of a call's backend: the requested one, the override or the fastest.

        The name is AUTO where the fastest is selected when the custom op runs.

        Raises:
            ValueError: the requested backend is unknown or does not support the inputs.
        """
        return REFERENCE if _backend.exporting_onnx() else self._choose(inputs, backend)

    def _choose(self, inputs: Any, backend: str | None) -> str:
        if self.composition is None:
            if backend or _backend.override():
                return requested_backend(
                    self.name,
                    backend,
                    self.backend_names(),
                    lambda name: self._public_refusal(name, inputs),
                )
            if self.backend_at_runtime:
                return REFERENCE if is_transformed() else AUTO
        elif _backend.override() not in (None, *self.backends):
            return REFERENCE
        if is_transformed():
            return REFERENCE
        left_to_pytorch = not self.autocast and torch.is_autocast_enabled("cpu")
        override = _backend.override()
        names = (override,) if override in self.backends else self._default_names(inputs[0])
        for name in names:
            if self.backends[name].refusal(inputs) is None and not (
                left_to_pytorch and name == "cpu"
            ):
                return name
        return REFERENCE

    def backend_names(self) -> list[str]:
        """The names of all backends that a call may request."""
        return [*self.backends, *(name for name in PYTORCH if name not in self.backends)]

    def refusal(self, name: str, inputs: Any) -> str | None:
        """The reason why a backend does not support the inputs, or None if it does."""
        return self.backends[name].refusal(inputs) if name in self.backends else None

    def _public_refusal(self, name: str, inputs: Any) -> str | None:
        """As :meth:`refusal`, also for the modes that are active: transforms and autocast."""
        if name not in self.backends:
            return None
        if is_transformed():
            return TRANSFORMED
        if name == "cpu" and not self.autocast and torch.is_autocast_enabled("cpu"):
            return "autocast is on, under which the op runs in PyTorch's operations"
        return self.backends[name].refusal(inputs)

    def _default_names(self, x: Tensor) -> Iterable[str]:
        """The backends that need no request. On a CPU Triton does: it would be interpreted."""
        return (name for name in self.backends if name != "triton" or not x.is_cpu)

    def select_backend(
        self, inputs: Any, requested: str = AUTO, *, last_resort: bool = False
    ) -> Backend:
        """Return the requested backend, or the first that supports the inputs.

        Called when a custom op runs. Where the schema has no backend, an override selects one, if
        that one supports the inputs. With ``last_resort`` PyTorch's operations run what no backend
        supports: a program may be exported on a machine with a kernel and run on one without.

        Raises:
            ValueError: the requested backend, or every backend, refuses the inputs.
        """
        override = None if self.backend_at_runtime else _backend.override()
        if override in self.backends and self.refusal(override, inputs) is None:
            return self.backends[override]
        if requested != AUTO and requested not in self.backends:
            raise ValueError(
                f"{self.name}: unknown backend {requested!r}; available: {sorted(self.backends)}"
            )
        # A requested backend is checked again: autocast may have changed a dtype since.
        names = self._default_names(inputs[0]) if requested == AUTO else (requested,)
        reasons = {}
        for name in names:
            reason = self.backends[name].refusal(inputs)
            if reason is None:
                if name == "dual" and inputs[0].is_cpu:
                    warn_if_missing()
                return self.backends[name]
            reasons[name] = reason
        if last_resort:
            return self._last_resort
        raise ValueError(f"{self.name}: no backend supports this call: {reasons}")

    def split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        """Split a backward op's arguments into gradients, inputs and saved tensors."""
        end = len(args) - self.backend_at_runtime
        options = end - (self.width - self.tensors)
        tensors, kept = self.results, self.results + self.tensors
        inputs = self.inputs(*args[tensors:kept], *args[options:end])
        return args[:tensors], inputs, args[kept:options]

    def cast(self, inputs: Any) -> Any:
        """The inputs as autocast casts them. Float64 stays, as in PyTorch's own rules."""
        dtype = torch.get_autocast_dtype(autocast_kind(inputs[0]))
        given = {name: getattr(inputs, name) for name in self.autocast}
        return inputs._replace(
            **{
                name: x if x is None or x.dtype == torch.float64 else x.to(dtype)
                for name, x in given.items()
            }
        )

    def _without_backend(self, inputs: Any, keep: bool = False) -> Any:
        out = (self.composition or self.definition)(inputs)
        if self.results > 1:
            return tuple(result.contiguous() for result in out)
        out = out.contiguous()
        return out if self.kept is None else (out, *self.fake(inputs, keep)[1:])

    def _by_definition(self, inputs: Any) -> Any:
        if not self.autocast:
            return (self.composition or self.definition)(inputs)
        with torch.autocast(autocast_kind(inputs[0]), enabled=False):
            return self.definition(inputs)
