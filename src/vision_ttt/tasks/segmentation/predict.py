"""Predicting the classes of the pixels of image files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import faster_coco_eval.core.mask as rle_masks
import numpy as np
from PIL import Image
from rich.table import Table
from torch import Tensor

from vision_ttt.data import open_image
from vision_ttt.errors import DamagedModel
from vision_ttt.tasks.images.pictures import Colour, with_legend
from vision_ttt.tasks.images.predicting import ImagePredictor, Prediction, SeenImage
from vision_ttt.tasks.segmentation.logits import TestView, predicted_labels
from vision_ttt.tasks.segmentation.pictures import coloured, overlaid
from vision_ttt.tasks.segmentation.transforms import TestTransform


@dataclass(frozen=True)
class SegmentPredictor(ImagePredictor):
    """Predicts the class of each pixel of image files.

    A prediction has `size`, the image's height and width, and `segments`: of each class that
    occurs, the largest first, class, share of the pixels, and segmentation, these pixels in COCO's
    run lengths.
    """

    drawings = ("pictures", "masks")
    columns = ("image", "class", "share")

    @property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """The one at test."""
        shown = self.carried["input"]
        return TestTransform(shown, shown["longer_side"], shown["test_shorter_side"]).image

    @cached_property
    def _segment(self) -> Callable[[Tensor], Tensor]:
        shown = self.carried["input"]
        view = TestView(shown["evaluation"], shown["window"], shown["stride"])
        return view.segment(self.model, len(self.carried["classes"]), self.precision)

    def predictions(self, seen: Sequence[SeenImage], files: Sequence[Path]) -> list[Prediction]:
        """Return the segments of some images."""
        found = []
        for each in seen:
            path = files[each.index]
            try:
                labels = predicted_labels(self._segment(each.image.to(self.device)), each.size)
            except ValueError as error:
                raise DamagedModel(
                    f"the model predicts NaN for {path}: its weights are damaged"
                ) from error
            segments = self._segments(labels.cpu().numpy())
            found.append({"image": str(path), "size": list(each.size), "segments": segments})
        return found

    def _segments(self, labels: np.ndarray) -> list[dict[str, Any]]:
        counts = np.bincount(labels.ravel())
        segments = []
        for index in np.argsort(-counts, kind="stable").tolist():
            if not counts[index]:
                break
            packed = rle_masks.encode(np.asfortranarray(labels == index, dtype=np.uint8))
            segments.append(
                {
                    "class": self.carried["classes"][index],
                    "share": int(counts[index]) / labels.size,
                    "segmentation": {
                        "size": list(labels.shape),
                        "counts": packed["counts"].decode("ascii"),
                    },
                }
            )
        return segments

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
        table = Table("class", title=prediction["image"], title_justify="left")
        table.add_column("share of pixels", justify="right")
        for each in prediction["segments"][: self.topk]:
            table.add_row(each["class"], f"{each['share']:.2%}")
        return table

    @cached_property
    def colours(self) -> list[Colour]:
        """Those of the checkpoint."""
        return [tuple(colour) for colour in self.carried["palette"]]

    def drawn(self, drawing: str, prediction: Prediction) -> Image.Image:
        """Return the image under the colours of its classes, with a legend; or their indices.

        The class indices of "masks" are an image [H, W] with a palette.
        """
        labels = np.zeros(prediction["size"], dtype=np.uint8)
        named = []
        for each in prediction["segments"]:
            place = self.carried["classes"].index(each["class"])
            labels[rle_masks.decode(each["segmentation"]).astype(bool)] = place
            named.append((f"{each['share']:.0%} {each['class']}", self.colours[place]))
        if drawing == "masks":
            return coloured(labels, self.colours)
        return with_legend(overlaid(open_image(prediction["image"]), labels, self.colours), named)
