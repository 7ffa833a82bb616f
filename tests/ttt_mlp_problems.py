"""Random problems for ttt_mlp, and their solution with every gradient."""

from functools import partial

import torch
from torch import Tensor

from learner_calls import in_one_call
from vision_ttt.ops import _triton
from vision_ttt.ops._table import TABLE

Problem = dict[str, Tensor]
OP = TABLE["ttt_mlp"]
KERNELS = sorted(name for name in OP.backends if name != "triton" or _triton.INTERPRETED)
BACKENDS = [*KERNELS, "reference"]
STATE = ("w1", "b1", "w2", "b2")
NAMES = OP.inputs._fields[: OP.tensors]


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
    """Tensor arguments of ttt_mlp; those the op wants in full precision stay float32.

    Rates and weights are such that the inner model learns without diverging over long sequences.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    lead = (batch,) if state_per_image else ()
    hidden = 4 * dim
    views = {name: normal(batch, length, heads, dim).to(dtype) for name in "qkv"}
    rates = torch.rand(batch, length, heads, dtype=torch.float64, generator=generator)
    others = {
        "eta": rates * (0.3 if norm else 0.05) / dim,
        "w1": normal(*lead, heads, dim, hidden) / dim**0.5,
        "b1": 0.3 * normal(*lead, heads, hidden),
        "w2": normal(*lead, heads, hidden, dim) / hidden**0.5,
        "b2": 0.3 * normal(*lead, heads, dim),
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
    """o, the final state and the gradients of a fixed random projection of all five."""
    function = function or partial(in_one_call, "ttt_mlp")
    o, state = function(**problem, **options, return_state=True)
    generator = torch.Generator().manual_seed(seed)
    loss = 0
    for output in (o, *state[:4]):
        weights = torch.randn(output.shape, dtype=torch.float64, generator=generator)
        weights = weights.bfloat16().double()  # the incoming gradient is exact in every dtype
        loss = loss + (output.double() * weights.to(output.device)).sum()
    gradients = torch.autograd.grad(loss, list(problem.values()))
    named = {f"grad {name}": g for name, g in zip(problem, gradients, strict=True)}
    return {"o": o, **dict(zip(STATE, state[:4], strict=True)), **named}
