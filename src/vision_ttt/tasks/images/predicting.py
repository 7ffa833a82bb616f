"""Predicting for image files, whatever is predicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from vision_ttt.data import SeededItems, make_loader, watched
from vision_ttt.data.image_files import ImageFiles, files_and_folders
from vision_ttt.data.loading import without_damaged
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.task import Batch
from vision_ttt.errors import DamagedItem
from vision_ttt.tasks.images.pictures import Colour, as_png, palette

Prediction = dict[str, Any]
"""`image`, the file's path, and what is predicted for it."""


class SeenImage(NamedTuple):
    """An image as the model is to see it."""

    image: Tensor
    """Of the predictor's `transform`."""
    size: tuple[int, int]
    """Height and width in the file."""
    index: int
    """Its place among the files."""


@dataclass(frozen=True)
class ImagePredictor(ABC):
    """A :class:`vision_ttt.engine.task.Predictor` for images; a task adds what is abstract here."""

    model: nn.Module
    """To call, on `device`."""
    metadata: ModelMetadata
    """Of the model's checkpoint, which was checked when it was loaded."""
    device: torch.device
    precision: str
    """Of autocast."""
    topk: int | None
    """Most answers per image where there are many; None: as the task has it."""
    batch_size: int
    """Images that are read at once."""
    num_workers: int

    unit: ClassVar[str] = "images"
    drawings: ClassVar[Sequence[str]] = ("pictures",)

    @property
    def carried(self) -> dict[str, Any]:
        """What the checkpoint carries."""
        return self.metadata.carried

    @cached_property
    def colours(self) -> list[Colour]:
        """A colour for each class."""
        return palette(len(self.carried["classes"]))

    @property
    @abstractmethod
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """What makes an RGB picture the model's; it can be pickled."""

    @abstractmethod
    def predictions(self, seen: Sequence[SeenImage], files: Sequence[Path]) -> list[Prediction]:
        """Return the predictions for some images of `files`, perhaps for none.

        Raises:
            DamagedModel: the model computes NaN.
        """

    @abstractmethod
    def drawn(self, drawing: str, prediction: Prediction) -> Image.Image:
        """Return one of `drawings`: for "pictures" the image with what is predicted, a legend."""

    def find(self, given: Sequence[str]) -> list[Path]:
        """Return the image files that are given, and all in the folders that are given."""
        return files_and_folders(given)

    def predict(
        self, files: Sequence[Path]
    ) -> Iterator[tuple[list[Prediction], list[DamagedItem]]]:
        """Yield per batch the predictions, and the errors of the images that do not decode."""
        items = SeededItems(ImageFiles(files), partial(_seen, self.transform))
        loader = make_loader(items, self.batch_size, _collate, num_workers=self.num_workers)
        for batch in watched(loader):
            with torch.inference_mode():
                found = self.predictions(batch["seen"], files)
            yield found, batch["damaged"]

    def file_of(self, prediction: Prediction) -> str:
        """Return the path of the image that a prediction is for."""
        return prediction["image"]

    def answer(self, predictions: Sequence[Prediction], skipped: Sequence[str]) -> Any:
        """Return the predictions, and the names of the images that do not decode."""
        return {"predictions": list(predictions), "skipped": list(skipped)}

    def draw(self, drawing: str, prediction: Prediction) -> bytes:
        """Return one of `drawings` of a prediction, as the content of a .png file."""
        return as_png(self.drawn(drawing, prediction))


def _seen(transform: Callable[[Image.Image], Tensor], image: Image.Image, index: int) -> SeenImage:
    return SeenImage(transform(image), (image.height, image.width), index)


def _collate(items: Sequence[SeenImage | DamagedItem]) -> Batch:
    seen, damaged = without_damaged(items)
    return {"seen": seen, "damaged": damaged}
