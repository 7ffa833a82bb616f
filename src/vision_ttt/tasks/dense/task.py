"""What detection and segmentation do alike: build the model and start it from weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vision_ttt.dense.backbone_weights import load_backbone
from vision_ttt.engine.building import load_weights
from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.initial_weights import trained_for, whose
from vision_ttt.engine.task import Task
from vision_ttt.engine.tensor_files import read_tensors

_MAPS = "maps."
"""What the names of backbone and adapter begin with in a dense model's weights."""

_ELSEWHERE = {
    "num_classes": "the data give it",
    "in_chans": "images are RGB",
    "dense": "set task.parts",
    "drop_path_rate": "set model.drop_path",
}


class DenseTask(Task):
    """A task whose model is a :class:`vision_ttt.dense.DenseModel`."""

    unit = "images"
    config: TrainConfig
    classes: tuple[str, ...]
    """Class names, by index."""

    def model_arguments(self) -> dict[str, Any]:
        """Return the number of classes, the parts around the backbone, and the backbone's own."""
        own = self.config.model.arguments
        for key in own:
            if key in _ELSEWHERE:
                raise ConfigError(f"model.arguments may not hold {key}; {_ELSEWHERE[key]}")
        section = self.config.task
        dense = {"maps": section.maps, **section.parts}
        return {"num_classes": len(self.classes), "dense": dense, **own}

    def start_from(
        self, path: Path, model: nn.Module, name: str, model_args: Mapping[str, Any]
    ) -> str:
        """Start a model from one of this task, its maps from another's, or from a classifier.

        Of a model of this task, the layers whose size follows from the number of classes are taken
        where they fit. Of another dense task's, backbone and adapter are taken; of a classifier,
        the backbone.

        Raises:
            FileNotFoundError, CheckpointError: there is no such file, or it is damaged.
            ConfigError: the weights are another model's.
        """
        weights, text = read_tensors(path)
        try:
            if trained_for(text) == self.config.task.name:
                skip = model.class_layers
                kept = load_weights(model, weights, path, skip=skip)
                return _line(path, text, len(model.state_dict()) - len(kept), kept=kept)
            maps = {key[len(_MAPS) :]: x for key, x in weights.items() if key.startswith(_MAPS)}
            if maps:
                load_weights(model.maps, maps, path)
                heads = sorted({key.partition(".")[0] for key in weights} - {_MAPS[:-1]})
                return _line(path, text, len(maps), heads)
            backbone = load_backbone(
                model.maps.backbone,
                weights,
                str(path),
                allow_unmatched=self.config.task.partial_weights,
            )
        except ValueError as error:
            raise ConfigError(f"initial_weights: {error}; {whose(text)}") from error
        return _line(
            path, text, len(backbone.taken), backbone.left_out, backbone.interpolated, backbone.kept
        )


def _line(
    path: Path,
    text: str | None,
    taken: int,
    left: Sequence[str] = (),
    interpolated: Sequence[str] = (),
    kept: Sequence[str] = (),
) -> str:
    parts = [f"{taken} tensors taken"]
    for names, what in (
        (interpolated, "of them interpolated"),
        (left, "of the file left out"),
        (kept, "of the model left at random"),
    ):
        if names:
            parts.append(f"{len(names)} {what} ({', '.join(names)})")
    return f"starting from {path}; {whose(text)}: {', '.join(parts)}."
