"""Finding objects in image files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.table import Table
from torch import Tensor

from vision_ttt.data import open_image
from vision_ttt.errors import DamagedItem
from vision_ttt.tasks.detection.evaluation import check_weights, detect, entries
from vision_ttt.tasks.detection.pictures import (
    SHOWN_SCORE,
    DrawnObject,
    corners,
    drawn_with_legend,
)
from vision_ttt.tasks.detection.transforms import TestTransform
from vision_ttt.tasks.images.models import normalise
from vision_ttt.tasks.images.predicting import ImagePredictor, Prediction, SeenImage


@dataclass(frozen=True)
class ObjectPredictor(ImagePredictor):
    """Finds the objects in image files.

    A prediction has `objects`: what was found, the best first, each in COCO's format of results but
    for the image (category_id, bbox, score, segmentation), with its class.
    """

    columns = ("image", "class", "category_id", "score", "x", "y", "width", "height")

    @property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """The one at test."""
        return TestTransform(self.carried["shorter_side"], self.carried["longer_side"]).image

    def predict(
        self, files: Sequence[Path]
    ) -> Iterator[tuple[list[Prediction], list[DamagedItem]]]:
        """Check the weights once, then predict."""
        check_weights(self.model)
        return super().predict(files)

    def predictions(self, seen: Sequence[SeenImage], files: Sequence[Path]) -> list[Prediction]:
        """Return the objects in some images."""
        ids = self.carried["category_ids"]
        names = dict(zip(ids, self.carried["classes"], strict=True))
        predictions = []
        for each in seen:
            image = normalise(each.image.to(self.device), self.carried["input"])
            found = entries(detect(self.model, image, each.size, self.precision), ids)
            objects = [
                {
                    "class": names[entry["category_id"]],
                    **entry,
                    "segmentation": {
                        "size": list(each.size),
                        "counts": entry["segmentation"]["counts"].decode("ascii"),
                    },
                }
                for entry in found[: self.topk]
            ]
            predictions.append({"image": str(files[each.index]), "objects": objects})
        return predictions

    def answer(self, predictions: Sequence[Prediction], skipped: Sequence[str]) -> list[Any]:
        """Return all that was found, in COCO's format of results.

        Each entry names its file. `image_id` is there where the data that the detector was trained
        on name files by their images' ids, and this file is named so. The skipped are left out.
        """
        return [
            {**self._image(prediction["image"]), **found}
            for prediction in predictions
            for found in prediction["objects"]
        ]

    def rows(self, prediction: Prediction) -> list[dict[str, Any]]:
        """Return a row for each object: image, class, category_id, score, x, y, width, height."""
        return [
            {
                "image": prediction["image"],
                **{name: found[name] for name in self.columns[1:4]},
                **dict(zip(self.columns[4:], found["bbox"], strict=True)),
            }
            for found in prediction["objects"]
        ]

    def table(self, prediction: Prediction) -> Table:
        """Return the best objects as a table for the terminal."""
        table = Table("class", title=prediction["image"], title_justify="left")
        for name in ("score", "x", "y", "width", "height"):
            table.add_column(name, justify="right")
        for found in self._shown(prediction):
            box = (f"{side:.1f}" for side in found["bbox"])
            table.add_row(found["class"], f"{found['score']:.2%}", *box)
        return table

    def drawn(self, drawing: str, prediction: Prediction) -> Image.Image:
        """Return the image with the best objects' boxes, masks and classes, and a legend."""
        labels = {number: n for n, number in enumerate(self.carried["category_ids"], start=1)}
        objects = [
            DrawnObject(
                labels[found["category_id"]],
                corners(found["bbox"]),
                found["segmentation"],
                found["score"],
            )
            for found in self._shown(prediction)
        ]
        image = open_image(prediction["image"])
        return drawn_with_legend(image, objects, self.carried["classes"], self.colours)

    def _shown(self, prediction: Prediction) -> list[dict[str, Any]]:
        return [each for each in prediction["objects"] if each["score"] >= SHOWN_SCORE]

    def _image(self, path: str) -> dict[str, Any]:
        stem = Path(path).stem
        if self.carried["ids_in_names"] and stem.isdecimal():
            return {"image_id": int(stem), "file_name": path}
        return {"file_name": path}
