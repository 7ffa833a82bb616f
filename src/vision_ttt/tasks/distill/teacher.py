"""The teacher: a model of timm or of this package with its weights, which nothing changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt.engine.building import build_model, load_weights
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.initial_weights import head_names, whose
from vision_ttt.engine.tensor_files import read_tensors
from vision_ttt.errors import reason_of
from vision_ttt.models.fitted_weights import checkpoint_filter_fn
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.models.registry import create_model, is_model, suggested_models
from vision_ttt.pretrained import weights_path
from vision_ttt.tasks.distill.config import DistillSection
from vision_ttt.tasks.images.models import data_config


class Teacher:
    """A model in evaluation mode, without gradients, and how it is shown the student's images.

    Args:
        section: names the teacher and what is learnt of it.
        classes: number of the dataset's.

    Raises:
        ConfigError: there is no such teacher, its weights do not fit, it has no such features, or
            for logits other classes than the dataset or a head that a pre-training left at random.
        FileNotFoundError, CheckpointError: its file is not there, or damaged.
    """

    def __init__(self, section: DistillSection, classes: int) -> None:
        self.name, self.match = section.teacher, section.match
        self.model = self._load(section, classes).eval().requires_grad_(False)
        count = getattr(self.model, "num_classes", None)
        if self.match == "logits" and count != classes:
            raise ConfigError(
                f"teacher {self.name} has {count} classes and the dataset {classes}; match 'logits'"
                " needs as many"
            )
        size = section.teacher_size or section.teacher_arguments.get("img_size")
        try:
            self.input = data_config(self.model, size)
            features = self._features(torch.zeros(1, *self.input["input_size"]))
            if self.match in ("pooled", "logits") and features[0].ndim != 2:
                raise ValueError(
                    f"it returns {list(features[0].shape)} for an image, and one vector is needed;"
                    " set its global_pool"
                )
            self.widths = [each.shape[1] for each in features]
        # Of timm's many models, those without such features or of another size fail in any way.
        except Exception as error:
            raise ConfigError(
                f"teacher {self.name}, match {self.match!r}: {reason_of(error)}"
            ) from error

    def _load(self, section: DistillSection, classes: int) -> nn.Module:
        name, arguments = section.teacher, dict(section.teacher_arguments)
        if section.teacher_weights is None:
            if not is_model(name):
                raise ConfigError(f"unknown teacher {name!r}; {suggested_models(name)}")
            try:
                return create_model(name, pretrained=True, **arguments)
            except Exception as error:  # of the network, of the files, of the arguments
                raise ConfigError(
                    f"teacher {name}: {reason_of(error)}; give its weights by teacher_weights"
                ) from error
        path = Path(weights_path(section.teacher_weights)).expanduser()
        arguments.setdefault("num_classes", classes if self.match == "logits" else 0)
        model = build_model(name, arguments)
        weights, text = read_tensors(path)
        skipped = () if self.match == "logits" else head_names(model)
        try:
            if isinstance(model, PlainBackbone):
                if self.match == "logits" and any(key.startswith("backbone.") for key in weights):
                    raise ValueError(
                        f"{path} is of a pre-training, which trains no head; match is 'logits':"
                        " accepted are the weights of a classifier"
                    )
                weights = checkpoint_filter_fn(weights, model)
            load_weights(model, weights, path, skip=skipped)
        except ValueError as error:
            raise ConfigError(f"teacher_weights: {error}; {whose(text)}") from error
        return model

    def __call__(self, images: Tensor, statistics: Mapping[str, Any]) -> list[Tensor]:
        """What the student is to learn of images [B, 3, H, W], as :class:`FeatureStudent` has it.

        Args:
            images: as the student sees them, normalised by its `statistics`, mean and std.
        """
        self.model.to(images.device)

        def levels(of: Mapping[str, Any], key: str) -> Tensor:
            return images.new_tensor(of[key]).view(-1, 1, 1)

        seen = images * levels(statistics, "std") + levels(statistics, "mean")
        seen = (seen - levels(self.input, "mean")) / levels(self.input, "std")
        size = tuple(self.input["input_size"][1:])
        if tuple(seen.shape[-2:]) != size:
            seen = F.interpolate(seen, size, mode="bilinear", antialias=True)
        return self._features(seen)

    def _features(self, images: Tensor) -> list[Tensor]:
        model = self.model
        with torch.no_grad():
            if self.match == "logits":
                return [model(images)]
            if self.match == "pooled":
                return [model.forward_head(model.forward_features(images), pre_logits=True)]
            count = len(model.blocks) if self.match == "layers" else 1
            return model.forward_intermediates(
                images,
                indices=count,
                norm=self.match == "tokens",
                output_fmt="NCHW",
                intermediates_only=True,
            )
