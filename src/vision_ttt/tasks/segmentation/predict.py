"""Predicting the classes of the pixels of image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as run_lengths
from PIL import Image
from rich.table import Table
from torch import Tensor

from vision_ttt.data import SeededItems, make_loader, open_image, watched
from vision_ttt.data.image_files import ImageFiles
from vision_ttt.engine.task import Batch
from vision_ttt.errors import DamagedItem, DamagedModel
from vision_ttt.tasks.images.pictures import Colour, with_legend
from vision_ttt.tasks.images.predicting import ImagePredictor
from vision_ttt.tasks.segmentation.metadata import check_carried
from vision_ttt.tasks.segmentation.pictures import coloured, overlaid
from vision_ttt.tasks.segmentation.resized_logits import predicted_labels
from vision_ttt.tasks.segmentation.transforms import TestTransform
from vision_ttt.tasks.segmentation.views import TestView

Prediction = dict[str, Any]
"""image: its path; size: its height and width; segments: of each class that occurs, the largest
first, class, share of the pixels, and segmentation, these pixels in COCO's run lengths."""


@dataclass(frozen=True)
class SegmentPredictor(ImagePredictor):
    """Predicts the class of each pixel of image files."""

    drawings = ("pictures", "masks")
    columns = ("image", "class", "share")

    def predict(
        self, files: Sequence[Path]
    ) -> Iterator[tuple[list[Prediction], list[DamagedItem]]]:
        """Yield per batch the predictions, and the errors of the images that do not decode.

        Raises:
            UserError: the model predicts NaN.
        """
        input_config = self._carried["input"]
        statistics = {name: input_config[name] for name in ("mean", "std")}
        transform = _Sized(
            TestTransform(
                statistics, input_config["longer_side"], input_config["test_shorter_side"]
            )
        )
        view = TestView(input_config["evaluation"], input_config["window"], input_config["stride"])
        segment = view.segment(self.model, len(self._carried["classes"]), self.precision)
        loader = make_loader(
            SeededItems(ImageFiles(files), transform),
            self.batch_size,
            _collate,
            num_workers=self.num_workers,
        )
        for batch in watched(loader):
            predictions = []
            for image, size, index in batch["images"]:
                logits = segment(image.to(self.device))
                try:
                    labels = predicted_labels(logits, size)
                except ValueError as error:
                    raise DamagedModel(
                        f"the model predicts NaN for {files[index]}: its weights are damaged"
                    ) from error
                predictions.append(self._prediction(files[index], labels.cpu().numpy()))
            yield predictions, batch["damaged"]

    def _prediction(self, path: Path, labels: np.ndarray) -> Prediction:
        counts = np.bincount(labels.ravel())
        order = [int(index) for index in np.argsort(-counts, kind="stable") if counts[index]]
        return {
            "image": str(path),
            "size": list(labels.shape),
            "segments": [
                {
                    "class": self._carried["classes"][index],
                    "share": int(counts[index]) / labels.size,
                    "segmentation": _encoded(labels == index),
                }
                for index in order
            ],
        }

    def answer(self, predictions: Sequence[Prediction], skipped: Sequence[str]) -> dict[str, Any]:
        """Return the predictions, each with its `topk` largest segments, and what was skipped."""
        named = [{**each, "segments": each["segments"][: self.topk]} for each in predictions]
        return super().answer(named, skipped)

    def rows(self, prediction: Prediction) -> list[dict[str, Any]]:
        """Return a row for each of the largest classes: image, class, share of the pixels."""
        return [
            {"image": prediction["image"], "class": each["class"], "share": each["share"]}
            for each in prediction["segments"][: self.topk]
        ]

    def table(self, prediction: Prediction) -> Table:
        """Return the largest classes as a table for the terminal."""
        table = Table(title=prediction["image"], title_justify="left")
        table.add_column("class")
        table.add_column("share of pixels", justify="right")
        for each in prediction["segments"][: self.topk]:
            table.add_row(each["class"], f"{each['share']:.2%}")
        return table

    def drawn(self, drawing: str, prediction: Prediction) -> Image.Image:
        """Return the image under the colours of its classes, with a legend; or their indices.

        The class indices of "masks" are an image [H, W] with a palette.
        """
        labels = self._labels(prediction)
        if drawing == "masks":
            return coloured(labels, self._palette)
        named = [
            (f"{each['share']:.0%} {each['class']}", self._palette[self._places[each["class"]]])
            for each in prediction["segments"]
        ]
        return with_legend(overlaid(open_image(prediction["image"]), labels, self._palette), named)

    def _labels(self, prediction: Prediction) -> np.ndarray:
        labels = np.zeros(prediction["size"], dtype=np.uint8)
        for each in prediction["segments"]:
            labels[_decoded(each["segmentation"])] = self._places[each["class"]]
        return labels

    @cached_property
    def _carried(self) -> dict[str, Any]:
        return check_carried(self.metadata)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._carried["classes"])}

    @cached_property
    def _palette(self) -> list[Colour]:
        return [tuple(colour) for colour in self._carried["palette"]]


@dataclass(frozen=True)
class _Sized:
    """An image as the model sees it, with its own height and width."""

    transform: TestTransform

    def __call__(self, image: Image.Image, index: int) -> tuple[Tensor, tuple[int, int], int]:
        return self.transform.image(image), (image.height, image.width), index


def _collate(items: Sequence[Any]) -> Batch:
    return {
        "images": [item for item in items if not isinstance(item, DamagedItem)],
        "damaged": [item for item in items if isinstance(item, DamagedItem)],
    }


def _encoded(pixels: np.ndarray) -> dict[str, Any]:
    """Pixels [H, W] bool in COCO's run lengths, as JSON holds them."""
    packed = run_lengths.encode(np.asfortranarray(pixels, dtype=np.uint8))
    return {"size": [int(side) for side in packed["size"]], "counts": _text(packed["counts"])}


def _decoded(packed: dict[str, Any]) -> np.ndarray:
    counts = packed["counts"].encode("ascii")
    return run_lengths.decode({"size": packed["size"], "counts": counts}).astype(bool)


def _text(counts: bytes | str) -> str:
    return counts.decode("ascii") if isinstance(counts, bytes) else counts
