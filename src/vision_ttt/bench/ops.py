"""The measurement of a sequence op: its contenders in turn with a matrix product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from vision_ttt.bench.memory import measure_memory
from vision_ttt.bench.op_contenders import op_contender
from vision_ttt.bench.problems import Problem
from vision_ttt.bench.protocol import Advance, Dropouts, Prepare, Settings, interleave
from vision_ttt.bench.rows import Row, Run
from vision_ttt.freed_memory import keep_freed_memory

PASSES = {"forward": False, "forward + backward": True}
"""Name of a measured call → whether it includes the backward pass."""
_MATMUL = "matmul"


def steps_of_ops(contenders: int, problems: int, repeats: int) -> int:
    """The most calls of `advance` by :func:`measure_ops`: warm-up, repeats and memory of each."""
    calls = contenders * len(PASSES)
    return problems * (calls * (repeats + 2) + repeats + 1)


def measure_ops(
    names: Sequence[str],
    problems: Sequence[Problem],
    settings: Settings,
    run: Run,
    *,
    advance: Advance = lambda _name: None,
) -> Iterator[list[Row]]:
    """Measure contenders against each other, one problem after the other.

    "forward" is a call in inference mode; "forward + backward" computes the gradients of all tensor
    arguments. On a CPU the process keeps what calls free, so that none waits for memory that
    another contender's call returned to the system. A matrix product is timed in turn with them: of
    1024 × 1024 float32 matrices on a CPU, of 8192 × 8192 matrices of the views' dtype on a GPU.
    `settings.batch_size` is ignored, because a problem has its own.

    A contender that runs out of memory or of time is not measured again at that length or above;
    its row has the reason.

    Yields:
        The rows of one problem, one per contender and pass.
    """
    if settings.device.type == "cpu":
        keep_freed_memory()
    dropouts = Dropouts()
    side = 8192 if settings.device.type == "cuda" else 1024
    for problem in problems:
        torch.compiler.reset()  # see measure_models
        prepared = {
            (name, measured): _prepare(problem, name, backward, settings)
            for name in names
            for measured, backward in PASSES.items()
        }
        labels = {key: " ".join(key) for key in prepared}
        ready = {label: prepared[key] for key, label in labels.items()}
        timings = interleave(
            {_MATMUL: _prepare_matmul(side, settings), **ready},
            settings,
            failed={label: dropouts.reason(label, problem.tokens) for label in ready},
            advance=advance,
        )
        matmul = timings[_MATMUL].seconds
        rows = []
        for (name, measured), prepare in prepared.items():
            label = labels[name, measured]
            timing, peak = measure_memory(prepare, settings.device, timings[label])
            if timing.failure:
                dropouts.add(label, problem.tokens, f"{problem.tokens:,} tokens", timing.failure)
            rows.append(
                Row(
                    what="ops",
                    contender=name,
                    measured=measured,
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
                    peak_bytes=peak,
                    matmul_macs_per_second=None if matmul is None else side**3 / matmul,
                    run=run,
                    case=problem.case,
                    failure=timing.failure,
                )
            )
            advance(label)
        yield rows


def _prepare(problem: Problem, name: str, backward: bool, settings: Settings) -> Prepare:
    contender = op_contender(name, problem)
    function = contender.timed
    if settings.compiled:
        function = torch.compile(function, dynamic=False)

    def prepare() -> Callable[[], object]:
        inputs = contender.inputs(problem, settings.dtype, settings.device, requires_grad=backward)
        if not backward:
            return partial(_forward, function, inputs)
        place = {"dtype": settings.dtype, "device": settings.device}
        incoming = torch.randn(problem.output_shape, **place)
        return partial(_forward_and_backward, function, inputs, incoming)

    return prepare


def _prepare_matmul(side: int, settings: Settings) -> Prepare:
    dtype = settings.dtype if settings.device.type == "cuda" else torch.float32

    def prepare() -> Callable[[], object]:
        left, right = torch.randn(2, side, side, device=settings.device, dtype=dtype)
        return partial(torch.matmul, left, right)

    return prepare


@torch.inference_mode()
def _forward(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Tensor:
    return function(**inputs)


def _forward_and_backward(
    function: Callable[..., Tensor], inputs: dict[str, Tensor], incoming: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(**inputs), list(inputs.values()), incoming)
