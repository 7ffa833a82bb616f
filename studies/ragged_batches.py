"""What a batch of images of several shapes costs: `python -m studies.ragged_batches MODEL…`.

Eight images from 96² to 512², 2,981 patches of 16 pixels, are run in four ways: as one ragged
batch, one after the other, padded to 512 × 512 pixels each, and by their share of a batch of eight
images of 304 × 304, each of which has about as many patches as these have in the mean.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence

import timm
import torch
from torch import Tensor, nn

import vision_ttt
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.data.naflex import Patchify, stack_sequences

SIDES = (
    (96, 96),
    (128, 192),
    (256, 160),
    (224, 224),
    (288, 320),
    (384, 256),
    (400, 464),
    (512,) * 2,
)
ALIKE = (304, 304)
WAYS = ("ragged", "loop", "padded", "share")


def measure(
    model: nn.Module, sides: Sequence[tuple[int, int]], alike: tuple[int, int], *, repeats: int
) -> dict[str, float]:
    """CPU seconds of a call, the least of the repeats, by :data:`WAYS`.

    A model in training mode makes a backward pass, too.

    Args:
        model: on the CPU, with patches of 16 pixels; it accepts all sizes.
        sides: of the images.
        alike: of as many images of one size.
        repeats: after one call each that is not measured.
    """
    images = [torch.randn(3, *size) for size in sides]
    largest = [max(each) for each in zip(*sides, strict=True)]
    batch, single = stack_sequences([Patchify(16)(image) for image in images]), images
    padded, uniform = (torch.randn(len(sides), 3, *size) for size in (largest, alike))
    seconds = {
        "ragged": _least(lambda: _run(model, batch), repeats),
        "loop": _least(lambda: [_run(model, image[None]) for image in single], repeats),
        "padded": _least(lambda: _run(model, padded), repeats),
        "share": _least(lambda: _run(model, uniform), repeats),
    }
    patches = sum(height * width for height, width in sides)
    seconds["share"] *= patches / (len(sides) * alike[0] * alike[1])
    return seconds


def _run(model: nn.Module, x: Tensor | Mapping[str, Tensor]) -> None:
    with torch.set_grad_enabled(model.training):
        loss = model(x).square().mean()
    if model.training:
        loss.backward()


def _least(call: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return min(taken[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row of a table in Markdown for each model."""
    parser = argparse.ArgumentParser(prog="python -m studies.ragged_batches")
    parser.add_argument("models", nargs="+", help="names of models with patches of 16 pixels")
    parser.add_argument("--train", action="store_true", help="forward and backward passes")
    parser.add_argument("--packed", action="store_true", help="by vision_ttt.for_inference")
    parser.add_argument("--repeats", type=int, default=5)
    arguments, console = parser.parse_args(argv), plain_console()
    for name in arguments.models:
        torch.manual_seed(0)
        model = timm.create_model(name, dynamic_img_size=True).train(arguments.train)
        if arguments.packed:
            model = vision_ttt.for_inference(model)
        seconds = measure(model, SIDES, ALIKE, repeats=arguments.repeats)
        times = " | ".join(f"{1e3 * seconds[way]:.0f} ms" for way in WAYS)
        ratio = seconds["ragged"] / seconds["share"]
        console.print(f"| {name} | {times} | {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
