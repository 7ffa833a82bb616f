"""The measurement of plain backbones with a ViT-Adapter, and of the same backbones alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.bench.complexity import count_macs
from vision_ttt.bench.contenders import Contender
from vision_ttt.bench.kernels import ATTENTION, kernels_run
from vision_ttt.bench.protocol import Advance, Dropouts, Prepare, Settings, interleave
from vision_ttt.bench.rows import Row, Run
from vision_ttt.bench.runtimes import TOLERANCES, pack
from vision_ttt.bench.tables import pixels
from vision_ttt.dense import ViTAdapter
from vision_ttt.dense.plain_encoder import as_encoder, headless
from vision_ttt.errors import UserError
from vision_ttt.freed_memory import keep_freed_memory

KINDS = ("with adapter", "backbone alone")
"""What is measured of a contender."""

UNIT = 32
"""Pixels; an adapter's images are padded to whole cells of its coarsest map."""

_CHECKED_SIZE = (96, 128)  # on which packed models are compared with their modules


class Entrant(NamedTuple):
    """A contender that is ready to be timed."""

    function: Callable[[Tensor], object]
    kernels: str
    failure: str


class BackboneAlone(nn.Module):
    """The blocks of a plain backbone on images padded as an adapter pads them."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = headless(backbone)

    def forward(self, images: Tensor) -> Tensor:
        encoder = as_encoder(self.backbone)
        height, width = images.shape[2:]
        return encoder.run_blocks(
            *encoder.embed(F.pad(images, (0, -width % UNIT, 0, -height % UNIT)))
        )


def build(contender: Contender, kind: str) -> nn.Module:
    """A contender in evaluation mode, with random weights.

    Raises:
        ConfigError: the model is unknown or accepts one image size only.
        UserError: the model is not plain.
    """
    backbone = contender.build(None)
    try:
        return (ViTAdapter if kind == KINDS[0] else BackboneAlone)(backbone).eval()
    except (TypeError, ValueError) as error:
        raise UserError(f"{contender.label} has no adapter: {error}") from error


@functools.cache
def multiply_adds(contender: Contender, kind: str, size: tuple[int, int]) -> int:
    """Count the multiply-adds of one image (height, width), on the meta device.

    Raises:
        ConfigError, UserError: see :func:`build`.
    """
    with torch.device("meta"):
        return count_macs(build(contender, kind), (3, *size))


def measure_dense(
    contenders: Sequence[Contender],
    sizes: Sequence[tuple[int, int]],
    settings: Settings,
    run: Run,
    *,
    advance: Advance = lambda _name: None,
) -> Iterator[list[Row]]:
    """Measure inference of the contenders against each other, one image size after the other.

    Every contender runs with an adapter and alone; the difference is the adapter's share. A packed
    contender is compared with its modules before it is timed.

    Args:
        contenders: modules, or those that ``for_inference`` packs.
        sizes: height and width of images.

    Yields:
        The rows of one size, in the order of the contenders, with adapter first.

    Raises:
        ConfigError, UserError: see :func:`build`.
    """
    if settings.device.type == "cpu":
        keep_freed_memory()
    dropouts = Dropouts()
    entrants = {
        (contender, kind): _enter(build(contender, kind), contender, settings)
        for contender in contenders
        for kind in KINDS
    }
    for height, width in sizes:
        torch.compiler.reset()
        failed, ready = {}, {}
        for (contender, kind), entrant in entrants.items():
            name = f"{contender.label}, {kind}"
            failed[name] = entrant.failure or dropouts.reason(name, height * width)
            ready[name] = _prepare(entrant.function, contender, settings, (height, width))
        timings = interleave(ready, settings, failed=failed, advance=advance)
        rows = []
        for (contender, kind), entrant in entrants.items():
            timing = timings[f"{contender.label}, {kind}"]
            rows.append(
                Row(
                    what="dense",
                    contender=contender.label,
                    measured=kind,
                    resolution=height,
                    width=None if width == height else width,
                    batch_size=settings.batch_size,
                    device=settings.device.type,
                    dtype=settings.dtype_name,
                    compiled=settings.compiled,
                    seconds=timing.seconds,
                    seconds_spread=timing.spread,
                    repeats=settings.repeats,
                    macs=multiply_adds(contender, kind, (height, width)),
                    run=run,
                    kernels=entrant.kernels,
                    failure=timing.failure,
                )
            )
            if timing.failure:
                name = f"{contender.label}, {kind}"
                dropouts.add(name, height * width, pixels(rows[-1]), timing.failure)
        yield rows


def shares(rows: Sequence[Row]) -> list[str]:
    """One sentence per contender and size on the adapter's share of the time."""
    found = []
    for whole, alone in zip(rows[::2], rows[1::2], strict=True):
        if whole.seconds is not None and alone.seconds is not None:
            share = 1 - alone.seconds / whole.seconds
            found.append(
                f"{whole.contender} at {pixels(whole)}: the adapter takes {share:.0%} of the time"
            )
    return found


def _enter(model: nn.Module, contender: Contender, settings: Settings) -> Entrant:
    """Move or pack the model; check that it runs what its label promises."""
    images = torch.randn(1, 3, *_CHECKED_SIZE)
    if contender.runtime is None:
        model = model.to(settings.device, settings.dtype)
        images = images.to(settings.device, settings.dtype)
        function, failure = model, ""
    else:
        function = pack(model, settings.dtype)
        failure = _difference(function, model, images, settings.dtype)
    with torch.no_grad():
        kernels = kernels_run(lambda: function(images))
    if contender.fuses_attention and not any(name.startswith(ATTENTION) for name in kernels):
        failure = "no fused attention kernel supports it"
    if settings.compiled and contender.runtime is None:
        function = torch.compile(function, dynamic=False)
    return Entrant(function, ", ".join(kernels), failure)


def _difference(packed: nn.Module, model: nn.Module, images: Tensor, dtype: torch.dtype) -> str:
    """How far packed results are from the modules', or "" within the dtype's tolerance."""
    with torch.no_grad():
        got, wanted = packed(images), model(images)
    if isinstance(got, Tensor):
        got, wanted = [got], [wanted]
    for x, exact in zip(got, wanted, strict=True):
        error = ((x - exact).abs().max() / exact.abs().max()).item()
        if not error <= TOLERANCES[dtype]:
            return f"maps are off by {error:.2g} of the largest, over {TOLERANCES[dtype]:.0e}"
    return ""


def _prepare(
    function: Callable[[Tensor], object],
    contender: Contender,
    settings: Settings,
    size: tuple[int, int],
) -> Prepare:
    dtype = settings.dtype if contender.runtime is None else torch.float32
    shape = (settings.batch_size, 3, *size)

    def prepare() -> Callable[[], object]:
        images = torch.randn(shape, device=settings.device, dtype=dtype)
        return torch.inference_mode()(functools.partial(function, images))

    return prepare
