"""What predicting for image files is, whatever is predicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import nn

from vision_ttt.data.image_files import files_and_folders
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.tasks.images.pictures import as_png

Prediction = dict[str, Any]
"""`image`, the file's path, and what is predicted for it."""


@dataclass(frozen=True)
class ImagePredictor(ABC):
    """A :class:`vision_ttt.engine.task.Predictor` for images; the task adds `predict` and rows."""

    model: nn.Module
    """To call, on `device`."""
    metadata: ModelMetadata
    device: torch.device
    precision: str
    """Of autocast."""
    topk: int | None
    """Most answers per image where there are many; None: as the task has it."""
    batch_size: int
    """Images that are read at once."""
    num_workers: int

    unit: ClassVar = "images"
    drawings: ClassVar[Sequence[str]] = ("pictures",)

    def find(self, given: Sequence[str]) -> list[Path]:
        """Return the image files that are given, and all in the folders that are given."""
        return files_and_folders(given)

    def file_of(self, prediction: Prediction) -> str:
        """Return the path of the image that a prediction is for."""
        return prediction["image"]

    def answer(self, predictions: Sequence[Prediction], skipped: Sequence[str]) -> Any:
        """Return the predictions, and the names of the images that do not decode."""
        return {"predictions": list(predictions), "skipped": list(skipped)}

    def draw(self, drawing: str, prediction: Prediction) -> bytes:
        """Return one of `drawings` of a prediction, as the content of a .png file."""
        return as_png(self.drawn(drawing, prediction))

    @abstractmethod
    def drawn(self, drawing: str, prediction: Prediction) -> Image.Image:
        """Return one of `drawings`: for "pictures" the image with what is predicted, a legend."""
