"""Finding objects in image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.table import Table

from vision_ttt.data import SeededItems, make_loader, open_image, watched
from vision_ttt.data.image_files import ImageFiles
from vision_ttt.engine.task import Batch
from vision_ttt.errors import DamagedItem
from vision_ttt.tasks.dense.task import normalise
from vision_ttt.tasks.detection.evaluation import check_weights, detect, entries
from vision_ttt.tasks.detection.metadata import check_carried
from vision_ttt.tasks.detection.pictures import SHOWN_SCORE, DrawnObject, drawn_with_legend
from vision_ttt.tasks.detection.transforms import Sample, TestTransform
from vision_ttt.tasks.images.pictures import Colour, palette
from vision_ttt.tasks.images.predicting import ImagePredictor

Prediction = dict[str, Any]
"""image: its path; objects: what was found, the best first, each in COCO's format of results but
for the image (category_id, bbox, score, segmentation), with its class."""


@dataclass(frozen=True)
class ObjectPredictor(ImagePredictor):
    """Finds the objects in image files."""

    columns = ("image", "class", "category_id", "score", "x", "y", "width", "height")

    def predict(
        self, files: Sequence[Path]
    ) -> Iterator[tuple[list[Prediction], list[DamagedItem]]]:
        """Yield per batch the predictions, and the errors of the images that do not decode.

        Raises:
            UserError: the detector computes NaN.
        """
        check_weights(self.model)
        carried = self._carried
        loader = make_loader(
            SeededItems(
                ImageFiles(files),
                TestTransform(carried["shorter_side"], carried["longer_side"]).image,
            ),
            self.batch_size,
            _collate,
            num_workers=self.num_workers,
        )
        for batch in watched(loader):
            yield (
                [self._prediction(files[each.index], each) for each in batch["samples"]],
                batch["damaged"],
            )

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
        rows = []
        for found in prediction["objects"]:
            x, y, width, height = found["bbox"]
            row = {name: found[name] for name in ("class", "category_id", "score")}
            box = {"x": x, "y": y, "width": width, "height": height}
            rows.append({"image": prediction["image"], **row, **box})
        return rows

    def table(self, prediction: Prediction) -> Table:
        """Return the best objects as a table for the terminal."""
        table = Table(title=prediction["image"], title_justify="left")
        table.add_column("class")
        for name in ("score", "x", "y", "width", "height"):
            table.add_column(name, justify="right")
        for found in self._shown(prediction):
            box = (f"{side:.1f}" for side in found["bbox"])
            table.add_row(found["class"], f"{found['score']:.2%}", *box)
        return table

    def drawn(self, drawing: str, prediction: Prediction) -> Image.Image:
        """Return the image with the best objects' boxes, masks and classes, and a legend."""
        labels = {number: n for n, number in enumerate(self._carried["category_ids"], start=1)}
        objects = [
            DrawnObject(labels[found["category_id"]], _corners(found["bbox"]), mask, score)
            for found in self._shown(prediction)
            for mask, score in [(_compressed(found["segmentation"]), found["score"])]
        ]
        image = open_image(prediction["image"])
        return drawn_with_legend(image, objects, self._carried["classes"], self._colours)

    def _shown(self, prediction: Prediction) -> list[dict[str, Any]]:
        return [each for each in prediction["objects"] if each["score"] >= SHOWN_SCORE]

    def _image(self, path: str) -> dict[str, Any]:
        stem = Path(path).stem
        if self._carried["ids_in_names"] and stem.isdecimal():
            return {"image_id": int(stem), "file_name": path}
        return {"file_name": path}

    def _prediction(self, path: Path, sample: Sample) -> Prediction:
        carried = self._carried
        names = dict(zip(carried["category_ids"], carried["classes"], strict=True))
        image = normalise(sample.image.to(self.device), carried["input"])
        with torch.inference_mode():
            found = detect(self.model, image, sample.size, self.precision)
        return {
            "image": str(path),
            "objects": [
                {"class": names[each["category_id"]], **each, "segmentation": _text(each)}
                for each in entries(found, carried["category_ids"])[: self.topk]
            ],
        }

    @cached_property
    def _carried(self) -> dict[str, Any]:
        return check_carried(self.metadata)

    @cached_property
    def _colours(self) -> list[Colour]:
        return palette(len(self._carried["classes"]))


def _collate(items: Sequence[Sample | DamagedItem]) -> Batch:
    return {
        "samples": [item for item in items if not isinstance(item, DamagedItem)],
        "damaged": [item for item in items if isinstance(item, DamagedItem)],
    }


def _corners(box: Sequence[float]) -> tuple[float, float, float, float]:
    x, y, width, height = box
    return x, y, x + width, y + height


def _text(found: dict[str, Any]) -> dict[str, Any]:
    """A mask as JSON holds it."""
    mask = found["segmentation"]
    return {"size": [int(side) for side in mask["size"]], "counts": mask["counts"].decode("ascii")}


def _compressed(mask: dict[str, Any]) -> dict[str, Any]:
    return {"size": mask["size"], "counts": mask["counts"].encode("ascii")}
