"""Training a detector: its losses on images with objects, COCO's evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.data import DatasetError, SeededItems
from vision_ttt.data.coco import CocoAnnotations, CocoImages
from vision_ttt.data.coco_reading import read_coco
from vision_ttt.data.loading import without_damaged
from vision_ttt.dense.building import build_detector
from vision_ttt.dense.detector import Detector
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import MachineSection, TrainConfig
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.described import check_number, check_texts, check_whole_numbers
from vision_ttt.engine.evaluation import autocast, objects_of_items
from vision_ttt.engine.task import Batch, Metric, Moment, Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.errors import DamagedItem, UserError, some
from vision_ttt.tasks.dense.config import check_below_root
from vision_ttt.tasks.dense.task import DenseTask
from vision_ttt.tasks.detection.config import DetectionData, DetectionSection
from vision_ttt.tasks.detection.evaluation import (
    KINDS,
    DetectionEvaluation,
    Detections,
    check_weights,
    detect,
    summarise,
)
from vision_ttt.tasks.detection.transforms import Sample, TestTransform, TrainTransform
from vision_ttt.tasks.images.models import (
    SIDE,
    check_statistics,
    described_data,
    input_statistics,
    normalise,
)

_BLANK = 64  # pixels; side of the image that stands in where there is none


class Detection(DenseTask):
    """The losses of Mask R-CNN; boxes and masks by COCO's average precision."""

    primary = Metric("box_ap", higher_is_better=True)

    def __init__(
        self, config: TrainConfig, test: CocoAnnotations, train: CocoAnnotations | None = None
    ) -> None:
        """Set the annotations; without those for training, the task only evaluates.

        Raises:
            DatasetError: the two have other categories.
        """
        if train is not None:
            _check_alike(train, test)
        self.config = config
        self.annotations = test
        self.train_annotations = train
        self.classes = test.classes
        self.precision = config.machine.precision

    def build_model(self, name: str, arguments: Mapping[str, Any]) -> Detector:
        """Build the detector on the backbone `name`; see `vision_ttt.dense.build_detector`."""
        return build_detector(name, **arguments)

    def prepare(self, model: nn.Module) -> None:
        """Set the images as the detector is to see them.

        Raises:
            DatasetError: there is no object to train on or none to test on; images are missing or
                their annotations wrong, and the run is not to skip what is damaged.
            FileNotFoundError: a folder of images is missing.
        """
        data, train = self.config.data, self.train_annotations
        self.input = input_statistics(model.maps.backbone)
        for part, coco in (("train", train), ("test", self.annotations)):
            missing = coco.missing(data.folder(part))
            if missing and not self.config.run.skip_bad:
                raise DatasetError(
                    f"{len(missing)} of the {len(coco)} images of {coco.path} are missing in"
                    f" {data.folder(part)}, such as {', '.join(missing[:3])}; run.skip_bad leaves"
                    " them out"
                )
            if coco.faults and not self.config.run.skip_bad:
                shown = "; ".join(list(coco.faults.values())[:3])
                raise DatasetError(
                    f"{len(coco.faults)} of the {len(coco)} images of {coco.path} have invalid"
                    f" annotations: {shown}; run.skip_bad leaves the images out"
                )
            if not coco.objects_beside(missing):
                among = "that are there and not faulty " if missing or coco.faults else ""
                raise DatasetError(
                    f"{coco.path} has no object to {part} on: the images {among}have none but crowd"
                    " regions and boxes without area"
                )
        images = CocoImages(train, data.folder("train"), train.places(data.empty_images))
        self.train_set = SeededItems(images, TrainTransform(data), self.config.run.seed)
        self.set_test(data.folder("test"), data.shorter_side, data.longer_side)

    @staticmethod
    def collate(items: Sequence[Sample | DamagedItem]) -> Batch:
        """Return images [3, h, w] uint8, targets, sizes before, places, and the damaged ones."""
        good, damaged = without_damaged(items)
        return {
            "images": [item.image for item in good],
            "targets": [item.target for item in good if item.target is not None],
            "sizes": [item.size for item in good],
            "indices": torch.tensor([item.index for item in good], dtype=torch.int64),
            "damaged": damaged,
        }

    def loss(self, forward: nn.Module, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        """Return the sum of Mask R-CNN's losses times the number of images, and that number.

        The losses are means over the regions of the batch's images, not over images.
        """
        images, targets = batch["images"], batch["targets"]
        count = len(images)
        if not count:
            blank = torch.zeros(
                3, _BLANK, _BLANK, dtype=torch.uint8, device=batch["indices"].device
            )
            images, targets = [blank], [_no_objects(blank)]
        with autocast(images[0].device, self.precision):
            losses = forward(self._normalised(images), targets)
        return sum(loss.float() for loss in losses.values()) * count, count

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        damaged: DamagedItems,
        between: Callable[[], None],
    ) -> DetectionEvaluation:
        """Return average precision, and every object that was found.

        Images pass the detector one by one: what it finds in one does not depend on the others, and
        the masks of one at a time are in memory.
        """

        def measure(batch: Batch) -> list[tuple[int, Detections]]:
            places = self.test_set.items.places[batch["indices"].cpu().numpy()].tolist()
            found = [
                (place, detect(model, image, size, self.precision))
                for place, image, size in zip(
                    places, self._normalised(batch["images"]), batch["sizes"], strict=True
                )
            ]
            # With a sharded model, all processes must run the same number of passes.
            for _ in batch["damaged"]:
                blank = torch.zeros(3, _BLANK, _BLANK, device=accelerator.device)
                detect(model, blank, (_BLANK, _BLANK), self.precision)
            return found

        if self.train_annotations is None:  # a run checks its weights at each update
            check_weights(model)
        found = objects_of_items(
            measure, model, loader, accelerator, damaged=damaged, between=between
        )
        return summarise(self.annotations, found)

    def carried(self) -> dict[str, Any]:
        """Return the classes, the input that the detector expects, and how files are named."""
        return {
            "classes": list(self.classes),
            "category_ids": list(self.annotations.category_ids),
            "input": {name: list(levels) for name, levels in self.input.items()},
            "shorter_side": self.config.data.shorter_side,
            "longer_side": self.config.data.longer_side,
            "ids_in_names": self.annotations.ids_in_names(),
        }

    def described(self) -> dict[str, Any]:
        """Return the folder's name, and what its files hold and training leaves out."""
        parts = {"train": self.train_annotations, "test": self.annotations}
        return {
            "dataset": self.config.data.root,
            **{
                f"{part}_{name}": count
                for part, coco in parts.items()
                for name, count in vars(coco.counts).items()
            },
        }

    def figures(self, evaluation: DetectionEvaluation) -> dict[str, Any]:
        """Return average precision over all and by class."""
        return {
            "images": len(evaluation.found),
            **evaluation.metrics,
            "classes": evaluation.classes,
        }

    def table(self, title: str, figures: Mapping[str, Any]) -> Table:
        """Return the average precision of each class and of all."""
        names = [f"{kind}_{name}" for kind in KINDS for name in ("ap", "ap50", "ap75")]
        table = Table("class", title=title)
        for name in ("objects", *(name.replace("_", " ").upper() for name in names)):
            table.add_column(name.replace("BOX", "box").replace("MASK", "mask"), justify="right")
        for row in figures["classes"]:
            shown = ("-" if row[name] is None else f"{row[name]:.1%}" for name in names)
            table.add_row(row["class"], str(row["objects"]), *shown)
        table.add_section()
        objects = sum(row["objects"] for row in figures["classes"])
        table.add_row("all", str(objects), *(f"{figures[name]:.1%}" for name in names))
        for size in ("small", "medium", "large"):
            given = [figures.get(f"{kind}_ap_{size}") for kind in KINDS]
            box, mask = ("-" if ap is None else f"{ap:.1%}" for ap in given)
            table.add_row(size, "", box, "", "", mask, "", "")
        return table

    def report(self, result: TrainResult) -> Report:
        """Write pictures of what was found, tables and curves."""
        from vision_ttt.tasks.detection.report import write_report

        return write_report(self, result)

    def set_test(self, folder: Path, shorter_side: int, longer_side: int) -> None:
        """Set `test_set` to the annotations' images in a folder."""
        images = CocoImages(self.annotations, folder, self.annotations.places())
        self.test_set = SeededItems(images, TestTransform(shorter_side, longer_side))

    def _normalised(self, images: Sequence[Tensor]) -> list[Tensor]:
        return list(map(partial(normalise, statistics=self.input), images))


def rebuild(metadata: ModelMetadata) -> Detector:
    """Build the detector that a checkpoint describes, randomly initialised.

    Raises:
        ValueError, TypeError, KeyError: the description is damaged.
    """
    _check_carried(metadata)
    return build_detector(metadata.model, **metadata.model_args)


def _check_carried(metadata: ModelMetadata) -> None:
    """Check what a checkpoint carries.

    It is: `classes`, the names by label - 1; `category_ids`, theirs in the data; `input`, mean and
    standard deviation of the colours; `shorter_side` and `longer_side` of the images in pixels;
    `ids_in_names`, whether files are named by their images' ids.
    """
    carried = metadata.carried
    count = metadata.model_args["num_classes"]
    check_texts("classes", carried["classes"], count)
    check_whole_numbers("category_ids", carried["category_ids"], count)
    if len(set(carried["category_ids"])) != count:
        raise ValueError("category_ids has one twice")
    for name in ("shorter_side", "longer_side"):
        check_number(name, carried[name], SIDE, whole=True)
    check_statistics(carried["input"])
    if not isinstance(carried["ids_in_names"], bool):
        raise TypeError("ids_in_names is not true or false")


def reopen(
    section: DetectionSection,
    metadata: ModelMetadata,
    changes: Mapping[str, Any],
    *,
    part: Literal["train", "test"],
    **machine: Any,
) -> Detection:
    """Read the COCO file of one part, as the test set of a checkpoint's detector.

    Raises:
        UserError: the categories are not those that the model was trained for; the checkpoint names
            no data and none are given, or their description is damaged; a path of theirs is
            absolute, which another root does not change; part is "all".
    """
    if part not in ("train", "test"):
        raise UserError(
            f"a detector is evaluated on one COCO file, of the part test or train, not {part!r}"
        )
    for name in changes:
        if name != "dataset":
            raise UserError(
                f"{name} is not accepted for a detector; give the folder of its data as dataset"
            )
    data = {**metadata.data, **({"root": changes["dataset"]} if changes else {})}
    described = described_data(DetectionData, data, root="root")
    if changes:
        check_below_root(described, (f"{part}_images", f"{part}_annotations"))
    config = TrainConfig(section, described, machine=MachineSection(**machine))
    task = Detection(config, read_coco(described.file(part)))
    carried = metadata.carried
    own = dict(zip(task.annotations.category_ids, task.classes, strict=True))
    trained = dict(zip(carried["category_ids"], carried["classes"], strict=True))
    if own != trained:
        raise DatasetError(
            f"{task.annotations.path} has {len(own)} categories, the checkpoint {len(trained)};"
            f" they differ in {_differing(own, trained)}"
        )
    task.input = carried["input"]
    task.set_test(described.folder(part), carried["shorter_side"], carried["longer_side"])
    return task


def _check_alike(train: CocoAnnotations, test: CocoAnnotations) -> None:
    given = [dict(zip(each.category_ids, each.classes, strict=True)) for each in (train, test)]
    if given[0] != given[1]:
        raise DatasetError(
            f"the categories of {train.path} and {test.path} differ in {_differing(*given)}"
        )


def _differing(first: Mapping[int, str], second: Mapping[int, str]) -> str:
    differing = sorted(set(first.items()) ^ set(second.items()))
    return some([f"{number} ({name})" for number, name in differing])


def _no_objects(image: Tensor) -> dict[str, Tensor]:
    height, width = image.shape[1:]
    return {
        "boxes": image.new_zeros(0, 4, dtype=torch.float32),
        "labels": image.new_zeros(0, dtype=torch.int64),
        "masks": image.new_zeros(0, height, width, dtype=torch.uint8),
    }
