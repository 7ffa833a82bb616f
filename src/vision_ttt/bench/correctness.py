"""Whether a backend of `ttt_linear` computes what it should: asked before it is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_ttt.bench.problems import Problem
from vision_ttt.ops import ttt_linear

# max|got − wanted| / max|wanted| of outputs and of gradients. Inputs are rounded before, so that
# only the arithmetic is judged.
TOLERANCES = {
    torch.float32: (1e-5, 5e-5),
    torch.bfloat16: (1e-2, 2e-2),
    torch.float16: (2e-3, 4e-3),
}


def find_error(
    backend: str, problem: Problem, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Compare a backend with `dual` in float64: output, final states and every gradient.

    The sequence is cut to three mini-batches and a ragged fourth; heads, d and b stay.

    Returns:
        What differs most, compared with its tolerance, and by how much; None if nothing exceeds it.
    """
    length = 3 * problem.mini_batch_size + max(1, problem.mini_batch_size // 2)
    short = problem._replace(tokens=min(problem.tokens, length))
    inputs = short.inputs(dtype, device, requires_grad=True)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    outgoing = torch.randn(short[:4], device=device, dtype=dtype)
    got = _solve(inputs, short, backend, outgoing)
    wanted = _solve(exact, short, "dual", outgoing)
    forward, gradient = TOLERANCES[dtype]
    errors = {name: _relative_error(got[name], wanted[name]) for name in wanted}
    allowed = {name: gradient if name.startswith("gradient") else forward for name in wanted}
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    if errors[worst] <= allowed[worst]:
        return None
    return f"{worst} is off by {errors[worst]:.2g} of its largest value, over {allowed[worst]:.0e}"


def _solve(
    inputs: dict[str, Tensor], problem: Problem, backend: str, outgoing: Tensor
) -> dict[str, Tensor]:
    o, (w, b) = ttt_linear(**inputs, **problem.options(backend), return_state=True)
    # The states take part in the loss, so that their gradients are checked as well.
    loss = (o * outgoing.to(o.dtype)).sum() + w.sin().sum() + b.sin().sum()
    gradients = torch.autograd.grad(loss, list(inputs.values()))
    named = {f"gradient of {name}": g for name, g in zip(inputs, gradients, strict=True)}
    return {"output o": o, "final state W": w, "final state b": b, **named}


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach()
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()
