"""The check of a contender's results against their definition, before it is timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vision_ttt.bench.op_contenders import Inputs, Outputs, backends, op_contender
from vision_ttt.bench.problems import Problem
from vision_ttt.errors import reason_of


def find_error(name: str, problem: Problem, dtype: torch.dtype, device: torch.device) -> str | None:
    """Compare a contender with its definition in float64: outputs and every gradient.

    The sequence is cut to three mini-batches and a short fourth one; heads, d and b stay. For a
    backend the definition is `dual`, and the outputs include the final state.

    Returns:
        The largest difference relative to its tolerance, or None if none exceeds it. For an
        exception in another project's implementation, its message: it must not end the measurement.
    """
    try:
        # A fixed seed: with some inputs a gradient almost cancels, and its relative error is large.
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return _find_error(name, problem, dtype, device)
    except Exception as error:
        if name in backends(problem.op):
            raise
        return f"{type(error).__name__}: {reason_of(error)}"


def _find_error(
    name: str, problem: Problem, dtype: torch.dtype, device: torch.device
) -> str | None:
    length = 3 * problem.mini_batch_size + max(1, problem.mini_batch_size // 2)
    short = problem._replace(tokens=min(problem.tokens, length))
    contender = op_contender(name, short)
    # Drawn on the CPU, so that every device computes on the same numbers.
    inputs = contender.inputs(short, dtype, torch.device("cpu"), requires_grad=True)
    inputs = {name: x.detach().to(device).requires_grad_() for name, x in inputs.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    outgoing = torch.randn(short.output_shape, dtype=dtype).to(device)
    got = _solve(contender.checked, inputs, outgoing)
    wanted = _solve(contender.exact, exact, outgoing)
    forward, gradient = contender.tolerances[dtype]
    errors = {name: _relative_error(got[name], wanted[name]) for name in wanted}
    allowed = {name: gradient if name.startswith("gradient") else forward for name in wanted}
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    if errors[worst] <= allowed[worst]:
        return None
    return f"{worst} is off by {errors[worst]:.2g} of its largest value, over {allowed[worst]:.0e}"


def _solve(function: Callable[..., Outputs], inputs: Inputs, outgoing: Tensor) -> Outputs:
    o, *states = (outputs := function(**inputs)).values()
    # The loss includes the states, so that their gradients are checked as well.
    loss = (o * outgoing.to(o.dtype)).sum() + sum(state.sin().sum() for state in states)
    gradients = torch.autograd.grad(loss, list(inputs.values()))
    named = {f"gradient of {name}": g for name, g in zip(inputs, gradients, strict=True)}
    return {**outputs, **named}


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach()
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()
