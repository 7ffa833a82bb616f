"""The op `ttt_linear`: its backends against each other, and against the machine's matmul rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from vision_ttt.bench.memory import peak_memory
from vision_ttt.bench.problems import Problem
from vision_ttt.bench.protocol import Advance, Prepare, Settings, interleave
from vision_ttt.bench.rows import Row, Run
from vision_ttt.ops import ttt_linear

PASSES = {"forward": False, "forward + backward": True}
MATMUL_SIDE = 1024
_MATMUL = f"matmul {MATMUL_SIDE}³ float32"


def steps_of_ops(backends: int, problems: int, repeats: int) -> int:
    """How often :func:`measure_ops` advances: warm-up, repeats and memory of each."""
    calls = backends * len(PASSES)
    return problems * (calls * (repeats + 2) + repeats + 1)


def measure_ops(
    backends: Sequence[str],
    problems: Sequence[Problem],
    settings: Settings,
    run: Run,
    *,
    advance: Advance = lambda _name: None,
) -> Iterator[list[Row]]:
    """Measure the backends against each other, one problem after the other.

    Forward is a call in inference mode; forward + backward computes the gradients of all tensor
    arguments. The matrix product of two 1024 × 1024 float32 matrices takes its turns among them.
    `settings.batch_size` is not used: a problem has its own.

    Yields:
        The rows of one problem, one per backend and pass.
    """
    for problem in problems:
        torch.compiler.reset()  # see measure_models
        prepared = {
            (backend, measured): _prepare(problem, backend, backward, settings)
            for backend in backends
            for measured, backward in PASSES.items()
        }
        named = {
            f"{backend} {measured}": prepared[backend, measured] for backend, measured in prepared
        }
        timings = interleave(
            {_MATMUL: _prepare_matmul(settings.device), **named},
            repeats=settings.repeats,
            device=settings.device,
            advance=advance,
        )
        rows = []
        for (backend, measured), prepare in prepared.items():
            timing = timings[f"{backend} {measured}"]
            rows.append(
                Row(
                    what="ops",
                    contender=backend,
                    measured=measured,
                    resolution=None,
                    tokens=problem.tokens,
                    heads=problem.heads,
                    dim=problem.dim,
                    mini_batch_size=problem.mini_batch_size,
                    batch_size=problem.batch,
                    device=settings.device.type,
                    dtype=settings.dtype_name,
                    compiled=settings.compiled,
                    seconds=timing.seconds,
                    seconds_spread=timing.spread,
                    repeats=settings.repeats,
                    macs=problem.macs(backward=PASSES[measured]),
                    peak_bytes=peak_memory(prepare, settings.device),
                    matmul_macs_per_second=MATMUL_SIDE**3 / timings[_MATMUL].seconds,
                    run=run,
                )
            )
            advance(f"{backend} {measured}")
        yield rows


def _prepare(problem: Problem, backend: str, backward: bool, settings: Settings) -> Prepare:
    function = partial(ttt_linear, **problem.options(backend))
    if settings.compiled:
        function = torch.compile(function, dynamic=False)

    def prepare() -> Callable[[], object]:
        inputs = problem.inputs(settings.dtype, settings.device, requires_grad=backward)
        if not backward:
            return partial(_forward, function, inputs)
        shape = inputs["q"].shape
        incoming = torch.randn(shape, dtype=settings.dtype, device=settings.device)
        return partial(_forward_and_backward, function, inputs, incoming)

    return prepare


def _prepare_matmul(device: torch.device) -> Prepare:
    def prepare() -> Callable[[], object]:
        left, right = torch.randn(2, MATMUL_SIDE, MATMUL_SIDE, device=device)
        return partial(torch.matmul, left, right)

    return prepare


@torch.inference_mode()
def _forward(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Tensor:
    return function(**inputs)


def _forward_and_backward(
    function: Callable[..., Tensor], inputs: dict[str, Tensor], incoming: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(**inputs), list(inputs.values()), incoming)
