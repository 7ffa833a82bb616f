"""`vision-ttt explain gradient-map|receptive-field|inner-loss|norms|fast-weights|distances`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jsonargparse
import torch
from torch import Tensor, nn

from vision_ttt import tasks
from vision_ttt.cli.arguments.explain import (
    MOST_MODELS,
    SAMPLE,
    WEIGHTS,
    name_and_arguments,
    split_models_and_images,
)
from vision_ttt.cli.device import find_device
from vision_ttt.cli.explained import KINDS, Batch, Kind, Part, Subject
from vision_ttt.cli.plain_console import plain_console, progress_on
from vision_ttt.data import open_image
from vision_ttt.data.image_files import files_and_folders
from vision_ttt.data.sample_images import NamedImage, sample_images
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.errors import DamagedModel, UserError
from vision_ttt.explain.saving import FORMATS, save_arrays, save_figure
from vision_ttt.file_kinds import as_text
from vision_ttt.tasks.images.backbones import ViewError, checkpoint_backbone, named_backbone

_SEQUENCES = 16
"""Default number of a language model's test sequences."""


def run(arguments: jsonargparse.Namespace) -> int:
    """Look into each model on the images, and write figures and arrays of what is found."""
    device = find_device(arguments.device)
    models, given = split_models_and_images(arguments.given)
    images = _images(given)[: arguments.limit]
    subjects = _subjects(models, arguments)
    shown = {subject.name: _shown(subject, images, arguments) for subject in subjects}
    kind = KINDS[arguments.what](arguments)
    folder = Path(arguments.output)
    console, errors = plain_console(), plain_console(stderr=True)
    found = {}
    with progress_on(errors) as progress:
        bar = progress.add_task("", total=sum(map(len, shown.values())))
        for subject in subjects:
            progress.update(bar, description=subject.name)
            subject.backbone.around.to(device)
            parts: list[Part] = []
            for batch in _batches(subject, shown[subject.name], arguments.batch_size, device):
                parts.append(_looked_at(kind, subject, batch, parts))
                progress.advance(bar, len(batch.names))
            subject.backbone.around.cpu()
            found[subject.name] = kind.gather(subject, parts)
        arrays = _finite(kind, found)
        folder.mkdir(parents=True, exist_ok=True)
        saved = save_arrays(folder, arguments.what, arrays)
        bar = progress.add_task("drawing", total=None)
        drawn: list[str] = []
        for name, figure in kind.figures(found):
            drawn = _distinct([*drawn, name])  # models' names may differ in signs alone
            save_figure(figure, folder, drawn[-1])
            progress.advance(bar)
    for line in kind.lines(found):
        console.say(line)
    for name in drawn:
        console.say(f"{folder / name}: {', '.join(FORMATS)}")
    what, count = "images" if images else "sequences", max(map(len, shown.values()))
    console.say(f"{saved}: all arrays (models: {len(found)}, {what}: {count})")
    return 0


def _looked_at(kind: Kind, subject: Subject, batch: Batch, former: Sequence[Part]) -> Part:
    """What is found on a batch, beside the batch."""
    if kind.one_size and former:
        sizes = [tuple(each.images.shape[2:]) for each in (former[0][0], batch)]
        if sizes[0] != sizes[1]:
            listed = " and ".join(f"{height} × {width}" for height, width in sizes)
            raise UserError(
                f"{kind.what} needs images of one size; {subject.name} is shown images of {listed}"
                " pixels: give images of one proportion; without --shorter-side, a classifier"
                " that was trained on crops is shown crops of one size"
            )
    try:
        return batch._replace(images=batch.images.cpu()), kind.look(subject, batch.images)
    # The model has no such thing, the sizes do not fit, or what it computes is not finite.
    except (TypeError, ValueError, torch.linalg.LinAlgError) as error:
        raise UserError(f"{subject.name}: {error}") from error


def _finite(kind: Kind, found: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arrays of what was found.

    Raises:
        UserError: an array is not finite, or the arrays cannot be computed.
    """
    try:
        arrays = kind.arrays(found)
    except ValueError as error:
        raise DamagedModel(f"{kind.what}: {error}; the model's weights may be damaged") from error
    for name, values in arrays.items():
        if not torch.isfinite(values).all():
            raise DamagedModel(f"{name} is not finite: the model's weights are damaged")
    return arrays


def _batches(
    subject: Subject, images: Sequence[NamedImage], size: int, device: torch.device
) -> Iterator[Batch]:
    """Images as the backbone is given them, up to `size` of one shape at once, in their order."""
    names, prepared = [], []
    for image in images:
        try:
            tensor = subject.backbone.prepare(image.open())
        except ViewError as error:
            raise UserError(f"{image.name}: {error}") from error
        if prepared and (len(prepared) == size or prepared[0].shape != tensor.shape):
            yield Batch(names, torch.stack(prepared).to(device))
            names, prepared = [], []
        names.append(image.name)
        prepared.append(tensor)
    yield Batch(names, torch.stack(prepared).to(device))


def _shown(
    subject: Subject, images: Sequence[NamedImage], arguments: jsonargparse.Namespace
) -> Sequence[NamedImage]:
    """What a model is shown: the images, or a language model's own test documents.

    Raises:
        UserError: a language model is given images, or another model is given none.
    """
    is_language = subject.metadata is not None and subject.metadata.task["name"] == "language"
    if is_language == bool(images):
        raise UserError(
            f"{subject.name} is a language model; only inner-loss explains it, without images"
            if is_language
            else f"no image is given for {subject.name}"
        )
    if not is_language:
        return images
    from vision_ttt.tasks.language.explained import test_sequences

    opened = test_sequences(subject.metadata, arguments.limit or _SEQUENCES)
    return [NamedImage(f"sequence-{index}", each) for index, each in enumerate(opened)]


def _images(given: Sequence[str]) -> list[NamedImage]:
    """The pictures that are given, each with a name of its own."""
    images = []
    for word in given:
        if word.startswith(SAMPLE):
            images += sample_images(word.removeprefix(SAMPLE))
        else:
            files = files_and_folders([word])
            images += [NamedImage(file.stem, partial(open_image, file)) for file in files]
    names = _distinct(image.name.replace("/", "-") for image in images)
    return [image._replace(name=name) for image, name in zip(images, names, strict=True)]


def _subjects(models: Sequence[str], arguments: jsonargparse.Namespace) -> list[Subject]:
    """The models that are given, and with --random each checkpoint's model before training, once.

    Raises:
        UserError: they are more than a figure shows.
    """
    names = arguments.names or map(_name, models)
    subjects: list[Subject] = []
    untrained_ones: list[ModelMetadata] = []
    for word, name in zip(models, names, strict=True):
        if not word.endswith(WEIGHTS):
            with torch.random.fork_rng():
                torch.manual_seed(arguments.seed)
                own, model_args = name_and_arguments(word)
                backbone = named_backbone(own, arguments.shorter_side, model_args)
            subjects.append(Subject(name, backbone))
            continue
        model, metadata = tasks.load_model(word, task=None)
        before = dataclasses.replace(metadata, epoch=0, update=0, averaged=False, metrics={})
        if arguments.random and before not in untrained_ones:
            untrained_ones.append(before)
            with torch.random.fork_rng():
                torch.manual_seed(arguments.seed)
                untrained = tasks.find(metadata.task["name"]).rebuild(metadata).eval()
            backbone = _backbone(untrained, before, arguments.shorter_side)
            subjects.append(Subject(f"{name} untrained", backbone, before))
        backbone = _backbone(model, metadata, arguments.shorter_side)
        subjects.append(Subject(name, backbone, metadata))
    if len(subjects) > MOST_MODELS:
        raise UserError(
            f"--random adds a model for each checkpoint, which makes more than {MOST_MODELS}"
            " models; a figure shows at most that many"
        )
    distinct = _distinct(subject.name for subject in subjects)
    return [each._replace(name=name) for each, name in zip(subjects, distinct, strict=True)]


def _backbone(model: nn.Module, metadata: ModelMetadata, shorter_side: int | None) -> Any:
    """What is looked into: a model's backbone of images, or a whole language model."""
    if metadata.task["name"] == "language":
        from vision_ttt.tasks.language.explained import ReadModel

        return ReadModel(model)
    return checkpoint_backbone(model, metadata, shorter_side=shorter_side)


def _name(word: str) -> str:
    """The folder's name for a file of a run, e.g. "digits" for runs/digits/best.safetensors."""
    path = Path(word)
    if word.endswith(WEIGHTS):
        return path.parent.name if path.stem in ("best", "last") and path.parent.name else path.stem
    return word


def _distinct(names: Iterable[str]) -> list[str]:
    """Names with numbers behind those that were there before."""
    distinct: list[str] = []
    for name in map(as_text, names):  # figures and archives hold nothing else
        number, own = 2, name
        while own in distinct:
            own, number = f"{name}-{number}", number + 1
        distinct.append(own)
    return distinct
