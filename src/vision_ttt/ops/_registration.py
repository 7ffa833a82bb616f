"""An op's declaration, and its custom ops: schema, shapes, derivatives, autocast, FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vision_ttt.ops._backend import autocast_kind
from vision_ttt.ops._contract import Contract

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""The device types with autocast."""


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


@dataclass(eq=False)
class Declaration:
    """What an op is made of.

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
        autocast: names of the tensors that autocast casts. Without any, an autocast call on a CPU
            runs in PyTorch's operations.
        exported: inputs → results in programs that run without this package. The default is the
            composition or the definition.
        flops, backward_flops: inputs, with shapes for tensors → floating point operations.
    """

    name: str
    inputs: type[Any]
    contract: Contract
    definition: Callable[[Any], Any]
    backends: dict[str, Backend]
    fake: Callable[..., Any]
    _: KW_ONLY
    schema: str
    backward_schema: str | None = None
    backward_contract: Contract | None = None
    composed_backward: Callable[..., tuple[Tensor | None, ...]] | None = None
    bare_contract: Contract | None = None
    results: int = 1
    kept: Callable[[Any], int] | None = None
    composition: Callable[[Any], Any] | None = None
    autocast: tuple[str, ...] = ()
    exported: Callable[[Any], Any] | None = None
    flops: Callable[[Any], int] | None = None
    backward_flops: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        self.bare_contract = self.bare_contract or self.contract
        self.exported = self.exported or self.composition or self.definition
        self.width, self.tensors = len(self.contract.names), len(self.contract.tensors)
        self.backend_at_runtime = "str backend" in self.schema
        """Whether a call without a requested backend selects one when the custom op runs."""

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

    def per_argument(self, tensors: Sequence[Any], gradients: Any) -> list[Tensor | None]:
        """The gradients of the inputs' tensors, None for those that are None."""
        gradients = gradients if self.tensors > 1 else (gradients,)
        pairs = zip(tensors, gradients, strict=False)  # the saved tensors follow
        return [None if x is None else gradient for x, gradient in pairs]


def register_forward(op: Declaration, run: Callable[..., Any]) -> Any:
    """Register ``vision_ttt::NAME``, without a derivative; ``run`` has its arguments."""
    forward = torch.library.custom_op(
        f"vision_ttt::{op.name}", run, mutates_args=(), schema=op.schema
    )

    @forward.register_fake
    def _(*args: Any) -> Any:
        rest = args[op.width : len(args) - op.backend_at_runtime]
        return op.fake(op.inputs(*args[: op.width]), *rest)

    packet = getattr(torch.ops.vision_ttt, op.name)
    if op.flops is not None:

        @register_flop_formula(packet)
        def _(*args: Any, **_: Any) -> int:
            return op.flops(op.inputs(*args[: op.width]))

    for device_type in DEVICES if op.autocast else ():
        _register_autocast(op, packet.default, device_type)
    return forward


def register_backward(op: Declaration, forward: Any, run: Callable[..., Any]) -> None:
    """Register ``vision_ttt::NAME_backward``, the derivative of ``forward``, and its derivative."""
    name = f"{op.name}_backward"
    backward = torch.library.custom_op(
        f"vision_ttt::{name}", run, mutates_args=(), schema=op.backward_schema
    )

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
        return *op.per_argument(saved, gradients), *[None] * ctx.others

    _register_derivative(op, forward, derivative)
    _derive_twice(op, backward)


def register_composed_backward(op: Declaration, forward: Any) -> None:
    """Register ``op.composed_backward``, of differentiable operations, as the derivative."""

    def derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = op.inputs(*ctx.saved_tensors[: op.tensors], *ctx.options)
        return *op.composed_backward(inputs, grad), *[None] * ctx.others

    _register_derivative(op, forward, derivative)


def _register_derivative(op: Declaration, forward: Any, derivative: Callable[..., Any]) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save a call's tensors, its results for the backward pass, and its options."""
        kept = () if op.kept is None else output[op.results :]
        if kept:
            ctx.mark_non_differentiable(*kept)
            # The kept tensors have no gradients. By default autograd would fill zeros for them.
            ctx.set_materialize_grads(op.results > 1)
            ctx.keeps = inputs[op.width]
        ctx.save_for_backward(*inputs[: op.tensors], *kept)
        ctx.options = inputs[op.tensors : op.width]
        ctx.backend = inputs[-1:] if op.backend_at_runtime else ()
        ctx.others = len(inputs) - op.tensors

    forward.register_autograd(derivative, setup_context=save)


def _derive_twice(op: Declaration, backward: Any) -> None:
    """Register the derivative of the backward pass, which gradient penalties need.

    With ``create_graph=True`` the kernels compute the gradient. The definition computes the
    derivatives of the gradient, of any order, at the definition's cost.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grads, arguments, _ = op.split(inputs)
        ctx.save_for_backward(*grads, *arguments[: op.tensors])
        ctx.options = arguments[op.tensors :]
        ctx.count = len(inputs)

    def derivative(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, as above
        grads, inputs = saved[: op.results], saved[op.results :]
        given = [i for i, x in enumerate(inputs) if x is not None]

        def at_places(tensors: Sequence[Tensor]) -> list[Tensor | None]:
            placed: list[Tensor | None] = [None] * op.tensors
            for i, x in zip(given, tensors, strict=True):
                placed[i] = x
            return placed

        def gradient(grads: Sequence[Tensor], present: Sequence[Tensor]) -> tuple[Tensor, ...]:
            def definition(*present: Tensor) -> Tensor | tuple[Tensor, ...]:
                return op.definition(op.inputs(*at_places(present), *ctx.options))

            _, pull_back = torch.func.vjp(definition, *present)
            return pull_back(tuple(grads) if op.results > 1 else grads[0])

        present = tuple(inputs[i] for i in given)
        _, pull_back = torch.func.vjp(gradient, tuple(grads), present)
        of_grads, of_present = pull_back(tuple(cotangents[i] for i in given))
        others = ctx.count - op.results - op.tensors
        return *of_grads, *at_places(of_present), *[None] * others

    backward.register_autograd(derivative, setup_context=setup_context)


_AUTOCAST_RULES: list[torch.library.Library] = []  # a rule lives as long as its library object


def _register_autocast(op: Declaration, forward: Any, device_type: str) -> None:
    def rule(*args: Any) -> Any:
        inputs = op.cast(op.inputs(*args[: op.width]))
        with torch.autocast(device_type, enabled=False):
            return forward(*inputs, *args[op.width :])

    library = torch.library.Library("vision_ttt", "FRAGMENT")
    library.impl(op.name, rule, f"Autocast{device_type.upper()}")
    _AUTOCAST_RULES.append(library)
