"""Random problems for ttt_linear, and their solution with every gradient."""

from functools import partial

import torch
from torch import Tensor

from learner_calls import in_one_call
from vision_ttt.ops import _triton
from vision_ttt.ops._table import TABLE

Problem = dict[str, Tensor]
OP = TABLE["ttt_linear"]
KERNELS = sorted(name for name in OP.backends if name != "triton" or _triton.INTERPRETED)
NAMES = OP.inputs._fields[: OP.tensors]
BACKENDS = [*KERNELS, "reference"]


def exact_dtype(backend: str) -> torch.dtype:
    """The widest dtype that a backend takes."""
    return torch.float32 if backend in ("cpu", "triton") else torch.float64


def make_problem(
    batch: int = 2,
    length: int = 37,
    heads: int = 3,
    dim: int = 16,
    mini_batch_size: int = 4,
    *,
    norm: bool = True,
    scale: str | None = "per head",
    state_per_image: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Problem:
    """Tensor arguments of ttt_linear; those the op wants in full precision stay float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    lead = (batch,) if state_per_image else ()
    views = {name: normal(batch, length, heads, dim).to(dtype) for name in "qkv"}
    others = {
        "eta": torch.rand(batch, length, heads, dtype=torch.float64, generator=generator) / dim,
        "w0": 0.3 * normal(*lead, heads, dim, dim),
        "b0": normal(*lead, heads, dim),
    }
    if norm:
        others["ln_weight"] = 1 + 0.1 * normal(heads, dim)
        others["ln_bias"] = 0.1 * normal(heads, dim)
    if scale is not None:
        shape = (heads, mini_batch_size) if scale == "per head" else (mini_batch_size,)
        others["position_scale"] = torch.rand(*shape, dtype=torch.float64, generator=generator)
    full = torch.promote_types(dtype, torch.float32)
    problem = views | {name: x.to(full) for name, x in others.items()}
    return {name: x.requires_grad_() for name, x in problem.items()}


def as_float64(problem: Problem) -> Problem:
    return {name: x.detach().double().requires_grad_() for name, x in problem.items()}


def solve(problem: Problem, *, seed: int = 1, function=None, **options) -> dict[str, Tensor]:
    """o, W, b and the gradients of a fixed random projection of all three."""
    function = function or partial(in_one_call, "ttt_linear")
    o, (w, b, *_) = function(**problem, **options, return_state=True)
    generator = torch.Generator().manual_seed(seed)
    loss = 0
    for output in (o, w, b):
        weights = torch.randn(output.shape, dtype=torch.float64, generator=generator)
        weights = weights.bfloat16().double()  # the incoming gradient is exact in every dtype
        loss = loss + (output.double() * weights.to(output.device)).sum()
    gradients = torch.autograd.grad(loss, list(problem.values()))
    named = {f"grad {name}": g for name, g in zip(problem, gradients, strict=True)}
    return {"o": o, "w": w, "b": b, **named}
