"""What every task on labelled images does alike: open them, transform them, batch them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from vision_ttt.data import (
    DatasetError,
    DatasetSpec,
    ImageError,
    ImageSplits,
    Sequences,
    collate,
    collate_sequences,
    evaluation_transform,
    open_dataset,
    train_transform,
    with_transform,
)
from vision_ttt.data.loading import Transform
from vision_ttt.data.sources import DRAWN, UndividedError
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import ConfigError, MachineSection, TaskSection, TrainConfig
from vision_ttt.engine.task import Batch, Task
from vision_ttt.files import same_path
from vision_ttt.models import DiT3
from vision_ttt.tasks.images.config import ImageData
from vision_ttt.tasks.images.models import (
    carried_sequences,
    check_accepts,
    check_classes,
    data_config,
    described_data,
    model_arguments,
    patch_of,
)

_LOGGER = logging.getLogger(__name__)
_WATCHED = 32  # images
_AUGMENTATION = (
    *("crop_scale", "crop_ratio", "horizontal_flip"),
    *("color_jitter", "auto_augment", "random_erasing"),
)


class ImageTask(Task):
    """A task on the images of the section :class:`ImageData`."""

    unit = "images"
    config: TrainConfig
    data: ImageSplits
    """Both parts of the dataset as PIL images."""
    input: dict[str, Any]
    """timm's data config, from `prepare` on: input_size, mean, std, …"""
    sequences: Sequences | None = None
    """Of images that keep their proportions, likewise; None for images of one size."""

    def __init__(self, config: TrainConfig) -> None:
        """Open the data.

        Raises:
            ConfigError: a stream is to repeat its images.
            DatasetError, FileNotFoundError: as :func:`vision_ttt.data.open_dataset`.
        """
        self.config = config
        self.source = dataset_spec(config.data)
        self.data = open_dataset(self.source)
        self.repeats = config.data.repeated_augmentation
        if self.repeats > 1 and isinstance(self.data.train, IterableDataset):
            raise ConfigError(
                f"repeated_augmentation is {self.repeats}; it must be 1 for {self.source.dataset},"
                " which is streamed"
            )

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, by index."""
        return self.data.classes

    def model_arguments(self) -> dict[str, Any]:
        """Return the number of classes, the image size where it counts, and the config's own."""
        data, model = self.config.data, self.config.model
        if data.num_classes not in (None, len(self.classes)):
            raise ConfigError(
                f"num_classes is {data.num_classes}, but {data.dataset} has {len(self.classes)}"
                " classes; leave it out"
            )
        return model_arguments(
            model.name,
            num_classes=len(self.classes),
            image_size=data.image_size,
            extra={**({"dynamic_img_size": True} if data.naflex else {}), **model.arguments},
        )

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError where the model is none for this task: by default, a denoiser."""
        if isinstance(model, DiT3):
            raise ConfigError(
                f"model {self.config.model.name} denoises and classifies nothing; set task to"
                " diffusion"
            )

    def prepare(self, model: nn.Module) -> None:
        """Set the images as `model` is to see them."""
        self.check_model(model)
        data = self.config.data
        self.input = data_config(model, data.image_size, data.crop_fraction)
        if data.naflex:
            self.sequences = Sequences(data.naflex, patch_of(model))
        try:
            augmentation = {name: getattr(data, name) for name in _AUGMENTATION}
            if self.sequences:
                augmentation |= self.sequences.arguments
            for_training = train_transform(self.input, **augmentation)
        except (AssertionError, ValueError, KeyError) as error:  # timm's, on a policy unknown to it
            raise ConfigError(f"auto_augment is {data.auto_augment!r}: {error}") from error
        workers, seed = self.config.machine.num_workers, self.config.run.seed
        for_test = test_transform(self.input, self.sequences)
        self.train_set = with_transform(self.data.train, for_training, seed, workers)
        self.test_set = with_transform(self.data.test, for_test, seed, workers)
        self._watched = None if self.sequences else spread_images(self.test_set, _WATCHED)
        check_accepts(model, self.example())

    def prepare_part(self, part: str) -> None:
        """Set `test_set` to a part of the data, for a trained model whose `input` is known.

        Raises:
            DatasetError: the model does not expect RGB images.
        """
        if (channels := self.input["input_size"][0]) != 3:
            raise DatasetError(
                f"the checkpoint's model expects {channels} channels; images are RGB, of 3"
            )
        transform = test_transform(self.input, self.sequences)
        workers = self.config.machine.num_workers
        self.test_set = with_transform(self.data.part(part), transform, 0, workers)

    @property
    def collate(self) -> Callable[[Sequence[Any]], Batch]:
        """Returns the good images with their classes and places, and the damaged ones' errors."""
        if self.sequences:
            return partial(collate_sequences, patch=self.sequences.patch)
        return partial(collate, image_shape=tuple(self.input["input_size"]))

    def watched(self) -> Tensor | None:
        """Return test images [N, 3, H, W]; None where these have no common size."""
        return self._watched

    def example(self) -> Tensor:
        """Return a black image of the size that the model expects."""
        return torch.zeros(1, *self.input["input_size"])

    def carried(self) -> dict[str, Any]:
        """Return the class names, the input that the model expects, and what was held out."""
        held_out = {"held_out": self.data.held_out} if self.data.held_out else {}
        own = {"sequences": self.sequences._asdict()} if self.sequences else {}
        return {"classes": list(self.classes), "input": self.input, **held_out, **own}

    def described(self) -> dict[str, Any]:
        """Return the dataset's name and the numbers of images."""
        return {
            "dataset": self.source.dataset,
            "train_images": len(self.data.train),
            "test_images": len(self.data.test),
        }


def reopen(
    section: TaskSection,
    metadata: ModelMetadata,
    changes: Mapping[str, Any],
    *,
    part: str,
    **machine: Any,
) -> ImageTask:
    """Return the task of a checkpoint with its data open, or with other data.

    Args:
        section: of the task, as far as it matters to the evaluation.
        changes: fields of the section `data`; another `dataset` leaves nothing of the former one.
        part: of the data that becomes the test set: "test", "train" or "all".
        machine: fields of the section `machine`.

    Raises:
        UserError: the checkpoint holds no dataset and none is given, or its description is damaged;
            the classes are not the model's, or that is not one of RGB images; the run held out
            other images of the same data for test.
    """
    data = {**metadata.data, **changes}
    if "dataset" in changes:
        data = {**changes, "num_classes": len(metadata.carried["classes"])}
    described = described_data(ImageData, data, root="dataset")
    config = TrainConfig(section, described, machine=MachineSection(**machine))
    try:
        opened = section.open(config)
    except UndividedError:
        if part != "all":
            raise
        # Which half an image is in does not matter to the whole.
        halves = dataclasses.replace(described, test_fraction=0.5)
        opened = section.open(dataclasses.replace(config, data=halves))
    then = metadata.carried.get("held_out")  # checkpoints of earlier versions do not say it
    if "dataset" in changes and opened.data.held_out not in (None, then):
        drawn = {name: metadata.data[name] for name in DRAWN if name in metadata.data}
        with contextlib.suppress(DatasetError):
            changed = dataclasses.replace(described, **{**drawn, **changes})
            divided_alike = section.open(dataclasses.replace(config, data=changed))
            if divided_alike.data.held_out == then:  # the run's own data at another place
                opened = divided_alike
    check_classes(metadata, opened.classes)
    trained_on, given = metadata.data.get("dataset", ""), opened.source.dataset
    if part != "all" and same_path(trained_on, given) and then not in (None, opened.data.held_out):
        raise DatasetError(
            f"the checkpoint's run held out other images of {opened.source.dataset} for test, and"
            " has trained on some of the images that are held out now: files were added, removed or"
            " renamed, or test_fraction differs; evaluate part 'all' (--split all)"
        )
    drawn = opened.data.held_out
    if part == "test" and "dataset" in changes and drawn not in (None, then):
        own, others = len(opened.data.test), len(opened.data.train)
        _LOGGER.info(
            f"{opened.source.dataset} has no part for test: {own} of its {own + others} images are"
            f" evaluated, drawn by test_fraction {opened.source.test_fraction} and split_seed"
            f" {opened.source.split_seed}; take part 'all' (--split all) for all of them"
        )
    opened.input = metadata.carried["input"]
    opened.sequences = carried_sequences(metadata.carried)
    opened.prepare_part(part)
    return opened


def test_transform(data_config: Mapping[str, Any], sequences: Sequences | None) -> Transform:
    """Return timm's evaluation transform, of images of one size or of sequences of patches."""
    if sequences:
        return sequences.evaluation_transform(data_config)
    return evaluation_transform(dict(data_config))


def dataset_spec(data: ImageData) -> DatasetSpec:
    """Return what of the section identifies its dataset."""
    names = (field.name for field in dataclasses.fields(DatasetSpec))
    return DatasetSpec(**{name: getattr(data, name) for name in names})


def spread_images(test_set: Dataset, count: int) -> Tensor:
    """Return up to `count` good test images [N, 3, H, W], evenly spaced: they may lie by class.

    Raises:
        DatasetError: none decodes.
    """
    if isinstance(test_set, IterableDataset):
        items = list(itertools.islice(iter(test_set), count))
    else:
        places = np.linspace(0, len(test_set) - 1, min(count, len(test_set))).astype(int)
        items = [test_set[int(place)] for place in places]
    images = [item[0] for item in items if not isinstance(item, ImageError)]
    if not images:
        raise DatasetError("the test set has no image that decodes")
    return torch.stack(images)
