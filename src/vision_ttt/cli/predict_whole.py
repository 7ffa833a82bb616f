"""`vision-ttt predict PICTURE --whole`: the mask of one picture of any size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import jsonargparse
import numpy as np
import torch
from torch import Tensor

from vision_ttt import tasks
from vision_ttt.cli.plain_console import plain_console, progress_on
from vision_ttt.dense import LinearSegmenter
from vision_ttt.errors import UserError
from vision_ttt.extras import require
from vision_ttt.files import write_bytes
from vision_ttt.tasks.images.pictures import as_png
from vision_ttt.tasks.segmentation.pictures import coloured
from vision_ttt.whole import ArrayPicture, Normalisation, WholePictures

_PREVIEW = 1024
"""Pixels of the preview's longer side at most."""
_MOST_CLASSES = 256


def run(arguments: jsonargparse.Namespace) -> int:
    """Write the mask of the picture, and a preview where one is asked for."""
    require("large", "--whole")
    from vision_ttt.whole.tiff import TiffPicture, write_mask

    model, metadata = tasks.load_model(arguments.checkpoint, task="segmentation")
    if not isinstance(model, LinearSegmenter):
        raise UserError(
            f"{arguments.checkpoint} holds a {type(model).__name__}; --whole is for linear "
            "segmenters (task.maps: tokens)"
        )
    classes, palette = metadata.carried["classes"], metadata.carried["palette"]
    if len(classes) > _MOST_CLASSES:
        raise UserError(f"the mask has a byte for each pixel; {len(classes)} classes do not fit")
    colours = [tuple(colour) for colour in palette]
    shown = metadata.carried["input"]
    normalisation = Normalisation(shown["mean"], shown["std"])
    output, path = Path(arguments.output), Path(arguments.files[0])
    if path.suffix.lower() == ".npy":
        picture, geographic = _array(path, normalisation), ()
    else:
        picture = TiffPicture(path, normalisation)
        geographic = picture.geographic
    scratch = arguments.scratch or output.with_name(f".{output.name}.scratch")
    whole = WholePictures(
        model,
        memory=arguments.memory,
        scratch=scratch,
        storage=getattr(torch, arguments.storage),
        dtype=getattr(torch, arguments.dtype),
    )
    size = picture.height, picture.width
    console, errors = plain_console(), plain_console(stderr=True)
    errors.say(str(whole.plan(size)))
    preview = _Preview(size)
    with progress_on(errors) as progress:
        bar = progress.add_task("bands", total=None)
        labels = whole.labels(
            picture, report=lambda done, total: progress.update(bar, completed=done, total=total)
        )
        bands = preview.watching(labels)
        write_mask(output, bands, size, classes=classes, colours=colours, geographic=geographic)
    console.say(f"{output}: {size[1]} × {size[0]} pixels, {len(classes)} classes")
    if arguments.preview is not None:
        write_bytes(Path(arguments.preview), as_png(coloured(preview.labels, colours)))
        console.say(f"{arguments.preview}: the preview")
    return 0


def _array(path: Path, normalisation: Normalisation) -> ArrayPicture:
    try:
        pixels = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is no array of numbers: {error}") from error
    try:
        return ArrayPicture(pixels, normalisation)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


class _Preview:
    """Every so-many-th pixel of a mask that goes by."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.step = -(-max(size) // _PREVIEW)
        self.labels = np.zeros([-(-side // self.step) for side in size], dtype=np.uint8)

    def watching(self, bands: Iterable[tuple[slice, Tensor]]) -> Iterator[Tensor]:
        """Yield the bands' labels."""
        for rows, labels in bands:
            first = -(-rows.start // self.step)
            picked = labels[first * self.step - rows.start :: self.step, :: self.step].numpy()
            self.labels[first : first + len(picked)] = picked
            yield labels
