"""The Fréchet distance of generated images to those of a dataset (FID)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torchmetrics.image.fid import FrechetInceptionDistance

from vision_ttt.data import ImageError, evaluation_transform, open_dataset, open_image
from vision_ttt.data.image_files import files_and_folders
from vision_ttt.data.loading import with_transform
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.errors import UserError
from vision_ttt.tasks.checkpoints import load_model
from vision_ttt.tasks.diffusion.pictures import CENTRED, to_pixels
from vision_ttt.tasks.images.config import ImageData
from vision_ttt.tasks.images.models import described_data
from vision_ttt.tasks.images.task import dataset_spec

_LEAST = 2  # images of either kind, for a covariance
_INCEPTION = 2048


class ClassifierFeatures(nn.Module):
    """What a classifier's head reads of images [B, 3, H, W] uint8, of any size.

    Args:
        model: with timm's ``forward_head``.
        expected: its input as a checkpoint carries it: input_size, mean and std.
    """

    def __init__(self, model: nn.Module, expected: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.size = tuple(expected["input_size"][1:])
        self.num_features = int(getattr(model, "head_hidden_size", model.num_features))
        self.register_buffer("mean", torch.tensor(expected["mean"]).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(expected["std"]).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = images.float() / 255
        if tuple(x.shape[2:]) != self.size:
            x = F.interpolate(x, self.size, mode="bicubic", antialias=True).clamp(0, 1)
        x = self.model.forward_features((x - self.mean) / self.std)
        return self.model.forward_head(x, pre_logits=True)


def measure_frechet(
    metadata: ModelMetadata,
    folder: Path,
    *,
    features: str | None,
    changes: Mapping[str, Any],
    part: str,
    batch_size: int,
) -> dict[str, Any]:
    """Compare the images in a folder with those of a diffusion model's data.

    Args:
        metadata: of the model's checkpoint, whose data are cropped as in its training.
        folder: of images, all of one size, in sub-folders or not.
        features: a classifier's checkpoint; None for Inception's last pooling, which torch-fidelity
            downloads: FID as published, but for the images' resizing, on as many images as there
            are (50,000 there).
        changes: fields of the section ``data``.
        part: of the data, "train", "test" or "all".
        batch_size: images at once.

    Returns:
        frechet_distance, made and real (numbers of images), features.

    Raises:
        UserError: images or features are missing, an image does not decode, or the model makes
            latents and the checkpoint, such as a converted one, does not record their images' size.
    """
    channels = metadata.carried["input"]["input_size"][0]
    if channels != 3 and metadata.task.get("autoencoder") is None:
        raise UserError(
            f"the checkpoint makes latents of {channels} channels and does not record the size of"
            " their images, to which the images of the data must be cropped"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    metric = _metric(features).to(device)
    counts = {"real": 0, "made": 0}
    for kind, batches in (
        ("real", _real(metadata, changes, part, batch_size)),
        ("made", _made(folder, batch_size)),
    ):
        for images in batches:
            metric.update(images.to(device), real=kind == "real")
            counts[kind] += len(images)
        if counts[kind] < _LEAST:
            raise UserError(f"{counts[kind]} {kind} images are too few: at least {_LEAST}")
    distance = float(metric.compute())
    name = "Inception" if features is None else features
    return {"frechet_distance": distance, **counts, "features": name}


def _metric(features: str | None) -> FrechetInceptionDistance:
    if features is not None:
        model, metadata = load_model(features, task="classification")
        own = ClassifierFeatures(model.eval(), metadata.carried["input"])
        return FrechetInceptionDistance(feature=own)
    try:
        return FrechetInceptionDistance(feature=_INCEPTION)
    except ModuleNotFoundError as error:
        raise UserError(
            "Inception's features need the package torch-fidelity (pip install torch-fidelity); or"
            " name a classifier's checkpoint with --fid-features"
        ) from error


def _real(
    metadata: ModelMetadata, changes: Mapping[str, Any], part: str, batch_size: int
) -> Iterator[Tensor]:
    former = {} if "dataset" in changes else metadata.data
    data = described_data(ImageData, {**former, **changes}, root="dataset")
    own = metadata.carried["input"]
    latents = metadata.task.get("autoencoder") is not None
    side = metadata.data.get("image_size") if latents else own["input_size"][1]
    config = {**own, **CENTRED, "input_size": (3, side, side), "interpolation": "bicubic"}
    if latents:  # as they were encoded
        config["crop_pct"] = metadata.data.get("crop_fraction") or 1.0
    images = open_dataset(dataset_spec(data)).part(part)
    items = with_transform(images, evaluation_transform(config), 0)
    streamed = isinstance(items, IterableDataset)
    every = iter(items) if streamed else (items[index] for index in range(len(items)))
    yield from _batched(map(_pixels, every), batch_size)


def _pixels(item: Any) -> Tensor:
    if isinstance(item, ImageError):
        raise item
    return to_pixels(item[0][None], CENTRED)


def _made(folder: Path, batch_size: int) -> Iterator[Tensor]:
    files = files_and_folders([str(folder)])
    size = None
    for number, images in enumerate(_batched(_opened(files), batch_size)):
        size = images.shape[2:] if number == 0 else size
        if images.shape[2:] != size:
            raise UserError(f"{folder} holds images of several sizes; they must be of one")
        yield images


def _opened(files: list[Path]) -> Iterator[Tensor]:
    from torchvision.transforms.functional import pil_to_tensor

    for file in files:
        yield pil_to_tensor(open_image(file))[None]


def _batched(images: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    batch: list[Tensor] = []
    for image in images:
        if batch and (len(batch) == size or image.shape != batch[0].shape):
            yield torch.cat(batch)
            batch = []
        batch.append(image)
    if batch:
        yield torch.cat(batch)
