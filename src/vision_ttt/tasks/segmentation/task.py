"""Training a segmenter: crops of labelled images, cross-entropy of pixels, mean IoU."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from vision_ttt.data import DatasetError, SeededItems
from vision_ttt.data.loading import without_damaged
from vision_ttt.data.mask_folders import IGNORED, check_names, open_mask_folders, read_classes
from vision_ttt.dense.building import build_segmenter
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import MachineSection, TaskSection, TrainConfig
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.described import check_numbers, check_texts, check_whole_numbers
from vision_ttt.engine.evaluation import autocast, rows_of_items
from vision_ttt.engine.section import Range
from vision_ttt.engine.task import Batch, Metric, Moment, Report
from vision_ttt.engine.train import TrainResult
from vision_ttt.errors import DamagedItem, DamagedModel, some
from vision_ttt.extras import require
from vision_ttt.tasks.dense.config import check_below_root
from vision_ttt.tasks.dense.task import DenseTask
from vision_ttt.tasks.images.models import (
    check_classes,
    check_statistics,
    described_data,
    input_statistics,
)
from vision_ttt.tasks.segmentation.config import ROOTS, SegmentationData
from vision_ttt.tasks.segmentation.evaluation import SegmentationEvaluation, measured
from vision_ttt.tasks.segmentation.logits import TestView
from vision_ttt.tasks.segmentation.pictures import class_colours
from vision_ttt.tasks.segmentation.transforms import LabelledTensors, TestTransform, TrainTransform

_LOGGER = logging.getLogger(__name__)
PARTS = ("train", "test")
_BYTE = Range(0, 255, "from 0 to 255")
_INPUT = ("longer_side", "test_shorter_side", "evaluation", "window", "stride")
"""The fields of `SegmentationData` that say how a model sees images at test."""
_LEAST_IMAGES = 2  # that a batch norm over one pixel of each image accepts, where there is one


class Segmentation(DenseTask):
    """Cross-entropy of the pixels' class logits.

    The unit is an image: its loss is the mean over all pixels of its crop, those without a class
    being 0. Crops have one size, so that an update's mean over its images, in however many parts
    and processes they come, is the mean over the pixels of the batch: the loss that the published
    schedules were found with. A mean over the labelled pixels alone would weigh an image by how
    much of it is labelled.
    """

    primary = Metric("miou", higher_is_better=True, form=".2%")

    def __init__(self, config: TrainConfig, parts: Sequence[str] = PARTS) -> None:
        """List the images and masks of `parts`; training takes all.

        Raises:
            DatasetError, FileNotFoundError: the dataset cannot be used.
        """
        require("dense", "segmentation")
        self.config = config
        self.classes, self.parts = open_parts(config.data, parts)
        self.precision = config.machine.precision
        self.auxiliary_weight = config.task.auxiliary_weight
        self.least_images = 1 if config.task.maps == "tokens" else _LEAST_IMAGES
        self.palette = class_colours(self.classes)
        self._warned = False

    def build_model(self, name: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Build the segmenter on a backbone, randomly initialised."""
        return build_segmenter(name, **arguments)

    def prepare(self, model: nn.Module) -> None:
        """Set the images as `model` is to see them."""
        data = self.config.data
        self.statistics = input_statistics(model.maps.backbone)
        for_training = TrainTransform(self.statistics, data)
        self.train_set = SeededItems(self.parts["train"], for_training, self.config.run.seed)
        self.show(data, self.parts["test"])

    def show(self, data: SegmentationData, items: Dataset) -> None:
        """Set the test images, and how the model sees them."""
        self.input = {name: getattr(data, name) for name in _INPUT}
        self.view = TestView(data.evaluation, data.window, data.stride)
        transform = TestTransform(self.statistics, data.longer_side, data.test_shorter_side)
        self.test_set = SeededItems(items, transform)

    @staticmethod
    def collate(items: Sequence[LabelledTensors | DamagedItem]) -> Batch:
        """Return lists of the good images [3, h, w] and labels [H, W], and the damaged ones'
        errors; crops of training are stacked in `loss`."""
        good, damaged = without_damaged(items)
        return {
            "images": [item.image for item in good],
            "labels": [item.labels for item in good],
            "indices": torch.tensor([item.index for item in good], dtype=torch.int64),
            "damaged": damaged,
        }

    def loss(self, forward: nn.Module, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        """Return the summed loss in nats of the images of a batch, and their number.

        An image's is the cross-entropy of its heads, the auxiliary one weighted, summed over the
        pixels that have a class and divided by the number of all pixels.
        """
        side = self.config.data.crop_size
        images = batch["images"]
        count = len(images)
        device = next(forward.parameters()).device
        missing = max(self.least_images - count, 0)
        seen = torch.stack(images) if images else torch.zeros(0, 3, side, side, device=device)
        seen = torch.cat((seen, seen.new_zeros(missing, 3, side, side)))
        with autocast(device, self.precision):
            both = [each[:count].float() for each in forward(seen, auxiliary=True)]
        if not count:
            return sum(each.sum() for each in both), 0
        labels = torch.stack(batch["labels"]).long()
        own, *others = (
            F.cross_entropy(each, labels, ignore_index=IGNORED, reduction="sum") for each in both
        )
        return (own + self.auxiliary_weight * sum(others)) / side**2, count

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        damaged: DamagedItems,
        between: Callable[[], None],
    ) -> SegmentationEvaluation:
        """Return intersections, unions and loss at the masks' own sizes.

        Raises:
            DatasetError: no pixel has a class.
            DamagedModel: the loss is not finite: the classes of such logits mean nothing.
        """
        classes = len(self.classes)
        segment = self.view.segment(model, classes, self.precision)

        def measure(batch: Batch) -> dict[str, Tensor]:
            each = [
                measured(segment(image), labels)
                for image, labels in zip(batch["images"], batch["labels"], strict=True)
            ]
            # With a sharded model, all processes must run the same number of passes.
            for _ in batch["damaged"]:
                segment(self.example()[0].to(accelerator.device))
            if not each:
                return {
                    "counts": torch.zeros(0, 3, classes, dtype=torch.int64),
                    "loss": torch.zeros(0, dtype=torch.float64),
                }
            counts, losses = zip(*each, strict=True)
            return {"counts": torch.stack(counts), "loss": torch.stack(losses)}

        rows = rows_of_items(measure, model, loader, accelerator, damaged=damaged, between=between)
        intersections, predicted, true = rows["counts"].sum(dim=0)
        pixels = int(true.sum())
        if not pixels:
            raise DatasetError(f"no pixel of the {len(rows['loss'])} test images has a class")
        loss = rows["loss"].sum().item() / pixels
        if not math.isfinite(loss):
            raise DamagedModel(
                f"the model's loss is {loss}: its weights are damaged, or it has diverged"
            )
        if accelerator.is_main_process:
            self._warn_of_absent(true)
        return SegmentationEvaluation(intersections, predicted, true, loss, len(rows["loss"]))

    def _warn_of_absent(self, true: Tensor) -> None:
        """Warn once of classes that no test image has: masks with other labels look like that."""
        absent = [name for name, pixels in zip(self.classes, true, strict=True) if not pixels]
        if absent and not self._warned:
            data = self.config.data
            from_1 = data.zero_is_unlabelled and data.root not in ROOTS
            _LOGGER.warning(
                "the test images have no pixel of %s; check the labels of the masks: the"
                " first class is %d, and %d stands for no class",
                *(some(absent), int(from_1), IGNORED),
            )
        self._warned = True

    def example(self) -> Tensor:
        """Return a black image of the size of the training crops."""
        side = self.config.data.crop_size
        return torch.zeros(1, 3, side, side)

    def carried(self) -> dict[str, Any]:
        """Return class names, their colours, and how the model sees images."""
        return {
            "classes": list(self.classes),
            "palette": [list(colour) for colour in self.palette],
            "input": {**{k: list(v) for k, v in self.statistics.items()}, **self.input},
        }

    def described(self) -> dict[str, Any]:
        """Return the dataset's name and the numbers of images and classes."""
        return {
            "dataset": self.config.data.root,
            "train_images": len(self.parts["train"]),
            "test_images": len(self.parts["test"]),
            "classes": len(self.classes),
        }

    def figures(self, evaluation: SegmentationEvaluation) -> dict[str, Any]:
        """Return the means and each class's IoU and accuracy; None where a class has none."""
        return {
            "images": evaluation.images,
            **self.input,
            **evaluation.metrics,
            "classes": [
                {"class": name, "pixels": pixels, "iou": _number(iou), "accuracy": _number(share)}
                for name, pixels, iou, share in zip(
                    self.classes,
                    evaluation.true.tolist(),
                    evaluation.iou.tolist(),
                    evaluation.accuracy.tolist(),
                    strict=True,
                )
            ],
        }

    def table(self, title: str, figures: Mapping[str, Any]) -> Table:
        """Return each class's IoU and accuracy, and the means."""
        table = Table("class", title=title)
        for name in ("pixels", "IoU", "accuracy"):
            table.add_column(name, justify="right")
        for row in figures["classes"]:
            shares = ("-" if row[key] is None else f"{row[key]:.2%}" for key in ("iou", "accuracy"))
            table.add_row(row["class"], f"{row['pixels']:,}", *shares)
        table.add_section()
        means = (f"{figures[name]:.2%}" for name in ("miou", "mean_accuracy"))
        table.add_row("mean of classes that occur", "", *means)
        table.add_row("all pixels", "", "", f"{figures['pixel_accuracy']:.2%}")
        table.add_row("loss", "", "", f"{figures['loss']:.4f}")
        table.add_row(f"images, seen {_seen(figures)}", str(figures["images"]), "", "")
        return table

    def report(self, result: TrainResult) -> Report:
        """Write curves, the classes' IoU and pictures of test images."""
        from vision_ttt.tasks.segmentation.report import write_report

        return write_report(self, result)


def open_parts(
    data: SegmentationData, parts: Sequence[str] = PARTS
) -> tuple[tuple[str, ...], dict[str, Dataset]]:
    """Return the class names, and each part's images with their masks.

    Raises:
        DatasetError, FileNotFoundError: the dataset cannot be used.
    """
    if data.root in ROOTS:
        opened = ROOTS[data.root](data.root_options)
        check_names(data.root, opened.classes)
        return opened.classes, {part: getattr(opened, part) for part in parts}
    root = Path(data.root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(2, "No such folder (root of the dataset)", str(root))
    classes = read_classes(root, None if data.classes is None else root / data.classes)
    fields = asdict(data)
    return classes, {
        part: open_mask_folders(
            root / fields[f"{part}_images"],
            root / fields[f"{part}_masks"],
            classes,
            zero_is_unlabelled=data.zero_is_unlabelled,
        )
        for part in parts
    }


def rebuild(metadata: ModelMetadata) -> nn.Module:
    """Build the model that a checkpoint describes, randomly initialised.

    Raises:
        ValueError, TypeError, KeyError: the description is damaged.
    """
    _check_carried(metadata)
    return build_segmenter(metadata.model, **metadata.model_args)


def _check_carried(metadata: ModelMetadata) -> None:
    carried = metadata.carried
    check_texts("classes", carried["classes"], metadata.model_args["num_classes"])
    colours = carried["palette"]
    if not isinstance(colours, Sequence) or len(colours) != len(carried["classes"]):
        raise ValueError("palette does not have a colour for each class")
    for place, colour in enumerate(colours):
        check_whole_numbers(f"palette[{place}]", colour, 3)
        check_numbers(f"palette[{place}]", colour, 3, _BYTE)
    check_statistics(carried["input"])
    shown = {name: carried["input"][name] for name in _INPUT}
    SegmentationData(**shown, shorter_side=shown["test_shorter_side"])  # checks them


def reopen(
    section: TaskSection,
    metadata: ModelMetadata,
    changes: Mapping[str, Any],
    *,
    part: str,
    **machine: Any,
) -> Segmentation:
    """Return the task of a checkpoint with its data open, or with other data.

    Args:
        section: of the task, as far as it matters to the evaluation.
        changes: fields of the section `data`; `dataset` stands for `root`.
        part: of the data that becomes the test set: "test", "train" or "all".
        machine: fields of the section `machine`.

    Raises:
        UserError: the checkpoint names no data and none are given; a change is of no field; the
            classes are not the model's; with `dataset`, a path of the checkpoint's data is
            absolute.
    """
    fields = {name: value for name, value in changes.items() if name != "dataset"}
    if "dataset" in changes:
        fields = {"root_options": {}, **fields, "root": changes["dataset"]}
    shown = {name: metadata.carried["input"][name] for name in _INPUT}
    data = described_data(SegmentationData, {**metadata.data, **shown, **fields}, root="root")
    parts = PARTS if part == "all" else (part,)
    if "dataset" in changes and data.root not in ROOTS:
        paths = [f"{each}_{kind}" for each in parts for kind in ("images", "masks")]
        check_below_root(data, [name for name in paths if name not in changes])
    opened = Segmentation(TrainConfig(section, data, machine=MachineSection(**machine)), parts)
    check_classes(metadata, opened.classes)
    opened.statistics = {name: metadata.carried["input"][name] for name in ("mean", "std")}
    items = ConcatDataset(opened.parts.values()) if part == "all" else opened.parts[part]
    opened.show(data, items)
    return opened


def _number(value: float) -> float | None:
    return None if value != value else value


def _seen(figures: Mapping[str, Any]) -> str:
    if figures["evaluation"] == "whole":
        return "whole"
    return f"in windows of {figures['window']}, stride {figures['stride']}"
