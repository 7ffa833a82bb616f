"""Predicting the classes of image files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from PIL import Image
from rich.table import Table
from torch import Tensor

from vision_ttt.data import open_image, stack_sequences
from vision_ttt.engine.evaluation import autocast
from vision_ttt.errors import DamagedModel
from vision_ttt.tasks.images.models import carried_sequences
from vision_ttt.tasks.images.pictures import with_legend
from vision_ttt.tasks.images.predicting import ImagePredictor, Prediction, SeenImage
from vision_ttt.tasks.images.task import test_transform


@dataclass(frozen=True)
class ClassPredictor(ImagePredictor):
    """Predicts the most probable classes of image files, `topk` of them.

    A prediction has `top`: class and probability of the most probable classes, best first.
    """

    @property
    def columns(self) -> list[str]:
        """Image, class_1, probability_1, class_2, …"""
        ranks = range(1, min(self.topk, len(self.carried["classes"])) + 1)
        return ["image", *(f"{name}_{rank}" for rank in ranks for name in ("class", "probability"))]

    @property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """timm's for evaluation; images of a model that was trained so keep their proportions."""
        return test_transform(self.carried["input"], carried_sequences(self.carried))

    def predictions(self, seen: Sequence[SeenImage], files: Sequence[Path]) -> list[Prediction]:
        """Return the most probable classes of some images."""
        if not seen:
            return []
        images = [each.image for each in seen]
        batch = torch.stack(images) if torch.is_tensor(images[0]) else stack_sequences(images)
        with autocast(self.device, self.precision):
            logits = self.model(send_to_device(batch, self.device))
        classes = self.carried["classes"]
        found = []
        for each, own in zip(seen, logits.float().softmax(dim=-1).cpu(), strict=True):
            path = files[each.index]
            if not torch.isfinite(own).all():
                raise DamagedModel(f"the model predicts NaN for {path}: its weights are damaged")
            best = own.topk(min(self.topk, len(classes)))
            named = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            top = [{"class": classes[index], "probability": value} for value, index in named]
            found.append({"image": str(path), "top": top})
        return found

    def rows(self, prediction: Prediction) -> list[dict[str, Any]]:
        """Return a prediction as one row."""
        row = {"image": prediction["image"]}
        for rank, entry in enumerate(prediction["top"], start=1):
            row |= {f"class_{rank}": entry["class"], f"probability_{rank}": entry["probability"]}
        return [row]

    def table(self, prediction: Prediction) -> Table:
        """Return a prediction as a table for the terminal."""
        table = Table("class", title=prediction["image"], title_justify="left")
        table.add_column("probability", justify="right")
        for entry in prediction["top"]:
            table.add_row(entry["class"], f"{entry['probability']:.2%}")
        return table

    def drawn(self, drawing: str, prediction: Prediction) -> Image.Image:
        """Return the image with its most probable classes beside it."""
        colours = dict(zip(self.carried["classes"], self.colours, strict=True))
        named = [
            (f"{entry['probability']:.0%} {entry['class']}", colours[entry["class"]])
            for entry in prediction["top"]
        ]
        return with_legend(open_image(prediction["image"]), named)
