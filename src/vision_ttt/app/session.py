"""What is computed for one visitor: a picture, looked at by one model. No visitor shares it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from vision_ttt.app.catalogue import LoadedModel
from vision_ttt.explain import (
    LossCourse,
    gradient_layers,
    gradient_magnitude,
    inner_loss_course,
    stage_norms,
)
from vision_ttt.explain.feature_maps import token_step
from vision_ttt.explain.gradient_maps import ONE_STEP
from vision_ttt.shown_text import shown
from vision_ttt.tasks.images.backbones import ImageBackbone


@dataclass(frozen=True)
class Layer:
    """What is seen of one block, or stage, of a model; None for what it does not have."""

    title: str
    """Such as "block 3 of 12"."""
    gradient: Tensor | None = None
    """‖G_t‖ [h, w], the mean over heads and directions."""
    norms: Tensor | None = None
    """‖x_t‖₂ [h, w] of the tokens after the block, or after its stage."""
    losses: LossCourse | None = None
    """Of its inner learners, along the scan."""
    step: tuple[int, int] | None = None
    """Rows and columns of pixels from token to token, None where the model does not say."""


@dataclass(frozen=True)
class Explanation:
    """What a model sees in a picture; float32 on the CPU."""

    model: str
    """Its name."""
    seen: Image.Image
    """The picture as the model is given it: resized, and cropped by most classifiers."""
    classes: dict[str, float] | None
    """The most probable classes with their probabilities, best first; None of other models."""
    drawn: Image.Image | None
    """The picture with what a detector or segmenter finds; None of other models."""
    layers: Sequence[Layer]
    """From first to last."""
    notes: Sequence[str]
    """Sentences on what is missing, and on how to read what is there."""


def explain(loaded: LoadedModel, picture: Image.Image, state: str | None = None) -> Explanation:
    """Predict for an RGB picture, and look at the model's inner learners and tokens meanwhile.

    Args:
        state: the state of the inner learners at which gradients are taken, see
            :func:`vision_ttt.explain.gradient_magnitude`. None for the model's default. A ViT³ has
            only one state, as has a linearised ViT with another inner model than "ttt_linear".

    Raises:
        UserError: the model computes NaN.
    """
    image = loaded.backbone.prepare(picture)
    with loaded.running:
        classes, drawn = _predicted(loaded, picture)
        layers = _layers(loaded.backbone, image[None].to(loaded.device), state)
    return Explanation(
        loaded.name,
        seen=to_pil_image(loaded.backbone.shown(image)),
        classes=classes,
        drawn=drawn,
        layers=layers,
        notes=_notes(loaded),
    )


def _predicted(
    loaded: LoadedModel, picture: Image.Image
) -> tuple[dict[str, float] | None, Image.Image | None]:
    """Classes, or a drawing; neither of a model of random weights."""
    if loaded.predictor is None:
        return None, None
    with tempfile.TemporaryDirectory() as folder:  # predictors read files
        path = Path(folder) / "picture.bmp"
        picture.save(path)
        (((found,), damaged),) = loaded.predictor.predict([path])
        if damaged:
            raise damaged[0]
        if "top" in found:
            return {shown(each["class"]): each["probability"] for each in found["top"]}, None
        return None, loaded.predictor.drawn("pictures", found)


def _layers(backbone: ImageBackbone, images: Tensor, state: str | None) -> list[Layer]:
    """The blocks of a backbone on images [1, 3, H, W], or its stages where these alone are seen."""
    grids = stage_norms(backbone.model, images)
    norms = [each for grid in grids for each in grid[0].cpu()]
    steps = [token_step(backbone.model, images, tuple(x.shape)) for x in norms]
    mixers = gradient_layers(backbone.around)
    if not mixers:
        kind = "block" if len(grids) == 1 else "stage"
        return [
            Layer(f"{kind} {n} of {len(norms)}", norms=x, step=step)
            for n, (x, step) in enumerate(zip(norms, steps, strict=True), start=1)
        ]
    if any(isinstance(mixer, ONE_STEP) for mixer in mixers.values()):
        state = None  # there is one only
    courses = inner_loss_course(backbone.around, images)
    layers = []
    stages = _by_stage(list(mixers))
    for number, names in enumerate(stages):
        indices = [list(mixers).index(name) for name in names]
        found = gradient_magnitude(backbone.around, images, state=state, layers=indices)
        for n, (name, gradient) in enumerate(zip(names, found[0].mean(1).cpu(), strict=True)):
            title = f"block {n + 1} of {len(names)}"
            at = indices[n] if len(norms) == len(mixers) else number
            layers.append(
                Layer(
                    title if len(stages) == 1 else f"stage {number + 1}, {title}",
                    gradient=gradient,
                    norms=norms[at],
                    losses=next((x for own, x in courses.items() if own.startswith(name)), None),
                    step=steps[at],
                )
            )
    return layers


def _by_stage(names: Sequence[str]) -> list[list[str]]:
    """Names of modules, those in one list of blocks together: they have one resolution."""
    stages: dict[str, list[str]] = {}
    for name in names:
        stages.setdefault(name.partition("blocks.")[0], []).append(name)
    return list(stages.values())


def _notes(loaded: LoadedModel) -> list[str]:
    notes = []
    if loaded.predictor is None:
        notes.append("The weights are random: nothing was learnt, and no class is predicted.")
    elif loaded.backbone.model is not loaded.backbone.around:
        notes.append("Token norms are those of the backbone alone, without the modules around it.")
    mixers = gradient_layers(loaded.backbone.around).values()
    if not mixers:
        notes.append("It has no TTT layers, hence no gradients and losses of inner learners.")
    elif any(isinstance(mixer, ONE_STEP) for mixer in mixers):
        notes.append(
            "Its learners take a single step: the gradients are those before it, and there are no"
            " losses to show."
        )
    return notes
