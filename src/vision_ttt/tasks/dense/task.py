"""What detection and segmentation do alike: build the model and start it from weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vision_ttt.dense.backbone_weights import BackboneLoad, fit_backbone, load_backbone
from vision_ttt.engine.building import load_weights
from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.initial_weights import trained_for, whose
from vision_ttt.engine.task import Task
from vision_ttt.engine.tensor_files import read_tensors
from vision_ttt.models.linear_vit import LinearViT

_MAPS = "maps."
"""What the names of backbone and adapter begin with in a dense model's weights."""
_BACKBONE = "maps.backbone."
"""What those of the backbone do."""

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
        the backbone. A ViT's weights fit its linear counterpart in all of them.

        Raises:
            FileNotFoundError, CheckpointError: there is no such file, or it is damaged.
            ConfigError: the weights are another model's.
        """
        weights, text = read_tensors(path)
        try:
            weights, vit = _linearised(model, weights, path)
            new = [_BACKBONE + name for name in vit.kept]
            if trained_for(text) == self.config.task.name:
                kept = [*load_weights(model, weights, path, skip=model.class_layers), *new]
                taken = len(model.state_dict()) - len(kept)
                return _line(path, text, taken, vit.left_out, vit.interpolated, kept)
            maps = {key[len(_MAPS) :]: x for key, x in weights.items() if key.startswith(_MAPS)}
            if maps:
                load_weights(model.maps, maps, path)
                heads = sorted({key.partition(".")[0] for key in weights} - {_MAPS[:-1]})
                left = [*heads, *vit.left_out]
                return _line(path, text, len(maps) - len(new), left, vit.interpolated, new)
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


def _linearised(
    model: nn.Module, weights: dict[str, Tensor], path: Path
) -> tuple[dict[str, Tensor], BackboneLoad]:
    """The weights of a dense model on a ViT as those of one on its linear counterpart.

    Returns:
        The weights, with the model's own inner models, and what was done with the ViT's; weights of
        any other model as they are.

    Raises:
        ValueError: the ViT is another one.
    """
    backbone = model.maps.backbone
    vit = {key[len(_BACKBONE) :]: x for key, x in weights.items() if key.startswith(_BACKBONE)}
    if not vit or not isinstance(backbone, LinearViT) or not backbone.can_inherit(vit):
        return weights, BackboneLoad((), (), ())
    taken, load = fit_backbone(backbone, vit, str(path))
    rest = {key: x for key, x in weights.items() if not key.startswith(_BACKBONE)}
    own = {_BACKBONE + key: x for key, x in (backbone.state_dict() | taken).items()}
    return {**rest, **own}, load


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
