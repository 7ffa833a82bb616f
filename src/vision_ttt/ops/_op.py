"""An op: its definition, its custom ops and its backends.

Every op has a folder with the same files: ``contract.py`` (the inputs and the checks on them),
``definition.py`` (the specification, in plain PyTorch), a file per backend, and ``op.py`` (the
public function, and the :class:`Op`). :mod:`vision_ttt.ops._table` lists all ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vision_ttt.ops import _backend, _native
from vision_ttt.ops._backend import AUTO, PYTORCH, REFERENCE, autocast_kind
from vision_ttt.ops._dispatcher_bypass import (
    RecordedCall,
    autocast_is_on,
    is_plain,
    needs_gradient,
)
from vision_ttt.ops._registration import (
    Backend,
    Declaration,
    register_backward,
    register_composed_backward,
    register_forward,
)

__all__ = ["Backend", "Op"]


class Op(Declaration):
    """A declared op: a call selects a backend by its inputs and runs it.

    The custom op ``vision_ttt::NAME`` covers all backends. Calls that need nothing of PyTorch's
    dispatcher, or only autograd, bypass it. The custom op is opaque to torch.compile and
    torch.export. Its backward pass is a custom op too (``vision_ttt::NAME_backward``), so that
    compiled backward graphs contain it. Higher derivatives are those of the definition.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._recorded = type(f"vision_ttt_{self.name}", (RecordedCall,), {})
        forward = register_forward(self, self._forward)
        self.forward_op = getattr(torch.ops.vision_ttt, self.name).default
        self.backward_op = None
        if self.backward_schema is not None:
            register_backward(self, forward, self._backward)
            self.backward_op = getattr(torch.ops.vision_ttt, f"{self.name}_backward").default
        elif self.composed_backward is not None:
            register_composed_backward(self, forward)

    def __call__(self, inputs: Any, backend: str | None = None, wanted: int | None = None) -> Any:
        """Compute the results by the requested backend, or by the fastest that supports the inputs.

        A call without a gradient may return only the first ``wanted`` results.

        Raises:
            TypeError, ValueError: the inputs violate the contract.
            ValueError: the requested backend is unknown or does not support the inputs.
        """
        plain = is_plain(inputs)
        if plain and autocast_is_on(inputs[0]):
            if self.autocast:
                return self._after_cast(inputs, backend, wanted)
            plain = not inputs[0].is_cpu  # on a CPU the op then runs in PyTorch's operations
        known = self.contract.check(inputs, plain)
        if plain:
            # Whether a backend supports a call depends only on the signature of the call.
            key = backend, _native.LIBRARY
            name = known.get(key)
            if name is None:
                name = known[key] = self.choose(inputs, backend, running=True)
            serving = self.backends.get(name)
            if serving is not None and not needs_gradient(inputs):
                if serving.inference is not None:
                    return serving.inference(inputs, wanted or self.results)
                if self.kept is None:
                    return serving.forward(inputs)
                return self._without_kept(serving.forward(inputs, False))
            if serving is not None and serving.backward is not None:
                return self._recorded.apply(self, name, *inputs)
        else:
            if self.autocast and torch.is_autocast_enabled(autocast_kind(inputs[0])):
                inputs = self.cast(inputs)
            if _backend.exporting_onnx():
                return self.exported(inputs)
            name = self.choose(inputs, backend)
        if name == REFERENCE:
            return self._by_definition(inputs)
        if self.kept is None:
            return self.forward_op(*inputs)
        keep = needs_gradient(inputs)
        return self._without_kept(
            self.forward_op(*inputs, keep, *((name,) if self.backend_at_runtime else ()))
        )

    def _after_cast(self, inputs: Any, backend: str | None, wanted: int | None) -> Any:
        """Cast a call's inputs as autocast does, and compute the results with autocast off."""
        self.contract.check(inputs)
        inputs = self.cast(inputs)
        with torch.autocast(autocast_kind(inputs[0]), enabled=False):
            return self(inputs, backend, wanted)

    def choose(self, inputs: Any, requested: str | None = None, *, running: bool = False) -> str:
        """Return the name of the backend that serves a call.

        It is the requested one, else the one of an override, else the fastest that supports the
        inputs. On a CPU, Triton would run in its interpreter, so it needs a request. The result is
        REFERENCE if the op runs in PyTorch's operations, and AUTO if the custom op selects the
        backend when it runs.

        If a composed op has no backend for an override, the override applies to its parts.

        Args:
            inputs: the op's, checked.
            requested: the name of a backend, AUTO or None for none.
            running: whether the results are computed now. Active modes have then been handled, an
                override is only a preference, and the result is never AUTO.

        Raises:
            ValueError: the requested backend is unknown, or does not support the inputs.
        """
        # A custom op that has no decomposition: a program of PyTorch's operations cannot hold it.
        is_opaque = self.composition is None and not self.backend_at_runtime
        if not running and (_backend.exporting_onnx() or (is_opaque and _backend.written_out())):
            return REFERENCE
        wanted, source = _backend.requested(None if requested == AUTO else requested)
        if wanted is None and self.backend_at_runtime and not running:
            return REFERENCE if _backend.is_transformed() else AUTO
        preferred = source != _backend.BY_CALL and (running or self.composition is not None)
        names = [name for name in self.backends if name != "triton" or not inputs[0].is_cpu]
        if wanted in self.backends:
            names = [wanted, *names] if preferred and running else [wanted]
        elif wanted is not None and not (preferred and running):
            if wanted in PYTORCH or preferred:
                return REFERENCE
            available = sorted({*self.backends, *PYTORCH})
            raise ValueError(
                f"{self.name}: unknown backend {wanted!r} (from {source}); available: {available}"
            )
        for name in names:
            reason = None if running else self._mode_refusal(name)
            reason = reason or self.backends[name].refusal(inputs)
            if reason is None:
                if running and name == "dual" and inputs[0].is_cpu:
                    _native.warn_if_missing()
                return name
            if wanted is not None and not preferred:
                raise ValueError(
                    f"{self.name}: backend {name!r} (from {source}) does not support this call: "
                    f"{reason}"
                )
        return REFERENCE

    def _mode_refusal(self, name: str) -> str | None:
        """The reason why a call cannot run on a backend in the active modes, None if it can."""
        if _backend.is_transformed():
            return "torch.func transforms and forward-mode derivatives need the backend 'reference'"
        if name == "cpu" and not self.autocast and torch.is_autocast_enabled("cpu"):
            return "autocast is on, under which the op runs in PyTorch's operations"
        return None

    def _without_kept(self, results: tuple[Tensor, ...]) -> Any:
        return results[: self.results] if self.results > 1 else results[0]

    def _by_definition(self, inputs: Any) -> Any:
        if not self.autocast:
            return (self.composition or self.definition)(inputs)
        with torch.autocast(autocast_kind(inputs[0]), enabled=False):
            return self.definition(inputs)

    def _forward(self, *args: Any) -> Any:
        """``vision_ttt::NAME``.

        If no backend supports a call, it runs in PyTorch's operations: a program may be exported on
        a machine with a kernel and run on one without. A call that saves tensors raises an error
        instead, and so does an op that selects its backend when it runs.
        """
        inputs, keep = self.inputs(*args[: self.width]), args[self.width :]
        self.bare_contract.check(inputs)
        requested = None
        if self.backend_at_runtime:
            *keep, requested = keep
        name = self.choose(inputs, requested, running=True)
        if name != REFERENCE:
            return self._run(self.backends[name].forward, inputs, *keep)
        if self.backend_at_runtime or any(keep):
            raise self._not_supported(inputs)
        out = (self.composition or self.definition)(inputs)
        if not isinstance(out, Tensor):
            return out
        out = out.contiguous()
        return out if self.kept is None else (out, *self.fake(inputs, *keep)[1:])

    def _backward(self, *args: Any) -> Any:
        """``vision_ttt::NAME_backward``."""
        self.backward_contract.check(args[:-1] if self.backend_at_runtime else args)
        grads, inputs, kept = self.split(args)
        if self.kept is not None and len(kept[-1]) != self.kept(inputs):
            raise ValueError(
                f"{self.name}_backward: needs {self.kept(inputs)} kept states, got {len(kept[-1])}"
            )
        requested = args[-1] if self.backend_at_runtime else None
        name = self.choose(inputs, requested, running=True)
        if name == REFERENCE:
            raise self._not_supported(inputs)
        return self._run(self.backends[name].backward, inputs, *grads, *kept)

    def _not_supported(self, inputs: Any) -> ValueError:
        reasons = {name: backend.refusal(inputs) for name, backend in self.backends.items()}
        return ValueError(f"{self.name}: no backend supports this call: {reasons}")

    def _run(self, function: Callable[..., Any], inputs: Any, *others: Any) -> Any:
        """Call a backend's function, with autocast off for an op that casts its own tensors."""
        kind = inputs[0].device.type
        if self.autocast and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return function(inputs, *others)
        return function(inputs, *others)
