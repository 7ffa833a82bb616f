"""Predicting the classes of image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.table import Table
from torch import Tensor

from vision_ttt.data import (
    TransformedImages,
    collate,
    evaluation_transform,
    make_loader,
    open_image,
    watched,
)
from vision_ttt.data.image_files import ImageFiles
from vision_ttt.engine.evaluation import autocast
from vision_ttt.errors import DamagedItem, DamagedModel
from vision_ttt.tasks.images.pictures import Colour, palette, with_legend
from vision_ttt.tasks.images.predicting import ImagePredictor

Prediction = dict[str, Any]
"""image: its path; top: class and probability of the most probable classes, best first."""


@dataclass(frozen=True)
class ClassPredictor(ImagePredictor):
    """Predicts the most probable classes of image files, `topk` of them."""

    @property
    def columns(self) -> list[str]:
        """Image, class_1, probability_1, class_2, …"""
        ranks = range(1, min(self.topk, len(self.metadata.carried["classes"])) + 1)
        return ["image", *(f"{name}_{rank}" for rank in ranks for name in ("class", "probability"))]

    def predict(
        self, files: Sequence[Path]
    ) -> Iterator[tuple[list[Prediction], list[DamagedItem]]]:
        """Yield per batch the predictions, and the errors of the images that do not decode.

        Raises:
            UserError: the model predicts NaN.
        """
        carried = self.metadata.carried
        loader = make_loader(
            TransformedImages(_UnlabelledImages(files), evaluation_transform(carried["input"])),
            self.batch_size,
            partial(collate, image_shape=tuple(carried["input"]["input_size"])),
            num_workers=self.num_workers,
        )
        for batch in watched(loader):
            images = batch["images"]
            probabilities = torch.empty(0, len(carried["classes"]))
            if len(images):
                with torch.inference_mode(), autocast(self.device, self.precision):
                    logits = self.model(images.to(self.device))
                probabilities = logits.float().softmax(dim=-1).cpu()
            places = batch["indices"].tolist()
            yield (
                [self._prediction(files[n], p) for n, p in zip(places, probabilities, strict=True)],
                batch["damaged"],
            )

    def _prediction(self, path: Path, probabilities: Tensor) -> Prediction:
        if not torch.isfinite(probabilities).all():
            raise DamagedModel(f"the model predicts NaN for {path}: its weights are damaged")
        classes = self.metadata.carried["classes"]
        best = probabilities.topk(min(self.topk, len(classes)))
        named = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return {
            "image": str(path),
            "top": [{"class": classes[index], "probability": value} for value, index in named],
        }

    def rows(self, prediction: Prediction) -> list[dict[str, Any]]:
        """Return a prediction as one row."""
        row = {"image": prediction["image"]}
        for rank, entry in enumerate(prediction["top"], start=1):
            row |= {f"class_{rank}": entry["class"], f"probability_{rank}": entry["probability"]}
        return [row]

    def table(self, prediction: Prediction) -> Table:
        """Return a prediction as a table for the terminal."""
        table = Table(title=prediction["image"], title_justify="left")
        table.add_column("class")
        table.add_column("probability", justify="right")
        for entry in prediction["top"]:
            table.add_row(entry["class"], f"{entry['probability']:.2%}")
        return table

    def drawn(self, drawing: str, prediction: Prediction) -> Image.Image:
        """Return the image with its most probable classes beside it."""
        colours = dict(zip(self.metadata.carried["classes"], self._colours, strict=True))
        named = [
            (f"{entry['probability']:.0%} {entry['class']}", colours[entry["class"]])
            for entry in prediction["top"]
        ]
        return with_legend(open_image(prediction["image"]), named)

    @cached_property
    def _colours(self) -> list[Colour]:
        return palette(len(self.metadata.carried["classes"]))


class _UnlabelledImages(ImageFiles):
    """The images of files, of no known class."""

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return super().__getitem__(index), -1
