"""`vision-ttt predict PICTURE --whole`: the mask, or the tokens, of one picture of any size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonargparse
import numpy as np
import torch
from torch import Tensor, nn

from vision_ttt import tasks
from vision_ttt.cli.plain_console import plain_console, progress_on
from vision_ttt.dense import LinearSegmenter
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.errors import UserError
from vision_ttt.extras import require
from vision_ttt.file_kinds import as_text
from vision_ttt.files import write_bytes
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.tasks.images.pictures import as_png
from vision_ttt.tasks.images.pretraining import PretrainedBackbone
from vision_ttt.tasks.segmentation.pictures import coloured
from vision_ttt.whole import Normalisation, WholePictures
from vision_ttt.whole.readers import open_picture, reader_of

_PREVIEW = 1024
"""Pixels of the preview's longer side at most."""
_MOST_CLASSES = 256


def run(arguments: jsonargparse.Namespace) -> int:
    """Write the mask of the picture, and a preview where one is asked for; or its tokens."""
    path = Path(arguments.files[0])
    reader = reader_of(path, arguments.reader, raster=arguments.bands is not None)
    features = arguments.features is not None
    require("zarr" if features else "large", "--features" if features else "--whole")
    model, metadata = (_backbone if features else _segmenter)(arguments.checkpoint)
    plain = model.maps.backbone if isinstance(model, LinearSegmenter) else model
    if not isinstance(plain, PlainBackbone):
        raise UserError(
            f"{arguments.checkpoint} holds a {type(plain).__name__}; --whole is for this package's"
            " plain backbones, what pre-trains one, and linear segmenters on one"
        )
    shown = metadata.carried["input"]
    picture: Any = open_picture(
        path,
        Normalisation(shown["mean"], shown["std"], arguments.largest),
        reader=reader,
        bands=arguments.bands,
        level=arguments.level,
        mpp=arguments.mpp,
    )
    output = Path(arguments.features if features else arguments.output)
    whole = WholePictures(
        model,
        memory=arguments.memory,
        scratch=arguments.scratch or output.with_name(f".{output.name}.scratch"),
        storage=getattr(torch, arguments.storage or "float32"),
        dtype=getattr(torch, arguments.dtype),
    )
    size = picture.height, picture.width
    console, errors = plain_console(), plain_console(stderr=True)
    plan = whole.plan(picture)
    errors.say(f"{path}, by the reader {reader}: {plan}")
    with progress_on(errors) as progress:
        bar = progress.add_task("bands", total=None)

        def report(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        if features:
            from vision_ttt.whole.zarr_store import write_features

            shape = write_features(
                output,
                whole.tokens(picture, report=report),
                plan.grid[0],
                dtype=getattr(torch, arguments.feature_dtype or "float16"),
                about={
                    "picture": as_text(path.name),
                    "model": metadata.model,
                    "patch": list(whole.embedding.patch),
                    "pixels": list(size),
                },
            )
            rows, columns, dim = shape
            console.say(f"{output}: {rows} × {columns} tokens of {dim} numbers")
            return 0
        from vision_ttt.whole.tiff import write_mask

        preview, colours = _Preview(size), [tuple(each) for each in metadata.carried["palette"]]
        write_mask(
            output,
            preview.watching(whole.labels(picture, report=report)),
            size,
            classes=metadata.carried["classes"],
            colours=colours,
            geographic=getattr(picture, "geographic", ()),
            has_gaps=getattr(picture, "has_gaps", False),
            mpp=getattr(picture, "mpp", None),
        )
    console.say(f"{output}: {size[1]} × {size[0]} pixels, {len(colours)} classes")
    if arguments.preview is not None:
        write_bytes(Path(arguments.preview), as_png(coloured(preview.labels, colours)))
        console.say(f"{arguments.preview}: the preview")
    return 0


def _segmenter(checkpoint: str) -> tuple[nn.Module, ModelMetadata]:
    model, metadata = tasks.load_model(checkpoint, task="segmentation")
    if not isinstance(model, LinearSegmenter):
        raise UserError(
            f"{checkpoint} holds a {type(model).__name__}; --whole is for linear segmenters "
            "(task.maps: tokens)"
        )
    if (classes := len(metadata.carried["classes"])) > _MOST_CLASSES:
        raise UserError(f"the mask has a byte for each pixel; {classes} classes do not fit")
    return model, metadata


def _backbone(checkpoint: str) -> tuple[nn.Module, ModelMetadata]:
    """A model that has tokens of pictures of any size."""
    model, metadata = tasks.load_model(checkpoint, task=None)
    if isinstance(model, PretrainedBackbone):
        model = model.backbone
    if isinstance(model, PlainBackbone):
        # The weights are those of a model that was made so.
        model.dynamic_img_size = model.dynamic_img_pad = True
    return model, metadata


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
