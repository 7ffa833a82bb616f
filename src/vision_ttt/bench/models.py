"""Whole models: inference and training steps against the resolution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vision_ttt.bench.complexity import count_macs
from vision_ttt.bench.contenders import NUM_CLASSES, Contender
from vision_ttt.bench.memory import peak_memory
from vision_ttt.bench.protocol import Advance, Prepare, Settings, interleave
from vision_ttt.bench.rows import Row, Run


def steps_of_models(contenders: int, resolutions: int, repeats: int) -> int:
    """How often :func:`measure_models` advances: warm-up, repeats and memory of each."""
    return contenders * resolutions * (repeats + 2)


def measure_models(
    contenders: Sequence[Contender],
    resolutions: Sequence[int],
    settings: Settings,
    run: Run,
    *,
    train: bool,
    advance: Advance = lambda _name: None,
) -> Iterator[list[Row]]:
    """Measure the contenders against each other, one resolution after the other.

    Inference is a forward pass in evaluation mode, weights in the given dtype. A training step is
    the forward and backward pass of the cross-entropy in training mode, float32 weights under
    autocast to the dtype; no optimiser. Its memory holds the gradients.

    Yields:
        The rows of one resolution, one per contender.

    Raises:
        ConfigError: a model cannot be built for a resolution.
    """
    for resolution in resolutions:
        # Compiled code is per model; what former resolutions left would count against its limit.
        torch.compiler.reset()
        prepared = {
            contender.label: _prepare(contender, resolution, settings, train)
            for contender in contenders
        }
        timings = interleave(
            prepared, repeats=settings.repeats, device=settings.device, advance=advance
        )
        rows = []
        for contender in contenders:
            with torch.device("meta"):  # the count needs shapes only
                macs = count_macs(contender.build(resolution), (3, resolution, resolution))
            timing = timings[contender.label]
            rows.append(
                Row(
                    what="train" if train else "models",
                    contender=contender.label,
                    measured="training step" if train else "inference",
                    resolution=resolution,
                    tokens=None,
                    heads=None,
                    dim=None,
                    mini_batch_size=None,
                    batch_size=settings.batch_size,
                    device=settings.device.type,
                    dtype=settings.dtype_name,
                    compiled=settings.compiled,
                    seconds=timing.seconds,
                    seconds_spread=timing.spread,
                    repeats=settings.repeats,
                    macs=macs,
                    peak_bytes=peak_memory(prepared[contender.label], settings.device),
                    matmul_macs_per_second=None,
                    run=run,
                )
            )
            advance(contender.label)
        yield rows


def _prepare(contender: Contender, resolution: int, settings: Settings, train: bool) -> Prepare:
    model = contender.build(resolution).to(settings.device).train(train)
    if not train:
        model = model.to(settings.dtype)
    function = torch.compile(model, dynamic=False) if settings.compiled else model
    shape = (settings.batch_size, 3, resolution, resolution)

    def prepare() -> Callable[[], object]:
        if not train:
            images = torch.randn(shape, device=settings.device, dtype=settings.dtype)
            return partial(_infer, function, images)
        images = torch.randn(shape, device=settings.device)
        labels = torch.randint(NUM_CLASSES, shape[:1], device=settings.device)
        model.zero_grad(set_to_none=True)
        return partial(_step, function, images, labels, settings.dtype)

    return prepare


@torch.inference_mode()
def _infer(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


def _step(model: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> None:
    with torch.autocast(images.device.type, dtype=dtype, enabled=dtype != torch.float32):
        loss = F.cross_entropy(model(images).float(), labels)
    loss.backward()
