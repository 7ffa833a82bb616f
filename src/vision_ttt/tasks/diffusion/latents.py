"""Latents of images: an autoencoder of diffusers, and what it makes of a dataset, kept on disk."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from vision_ttt.data import DatasetError, ImageError, with_transform
from vision_ttt.data.loading import SeededItems, Transform
from vision_ttt.engine.described import read_json
from vision_ttt.engine.locks import alone_in
from vision_ttt.errors import UserError, reason_of
from vision_ttt.extras import require
from vision_ttt.files import write_text

_LOGGER = logging.getLogger(__name__)


class Autoencoder:
    """A variational autoencoder of diffusers: images in -1 … 1 ↔ latents of about unit variance.

    Args:
        name: a folder with config.json and safetensors weights, or the name of one in the cache of
            Hugging Face's hub. Nothing is downloaded.

    Attributes:
        factor: pixels along a side of a latent's cell.
        channels: C of a latent.

    Raises:
        UserError: there is no such autoencoder, or it is none of this kind.
        MissingPackageError: diffusers is not installed.
    """

    def __init__(self, name: str) -> None:
        require("diffusion", "an autoencoder")
        from diffusers import AutoencoderKL

        try:
            model = AutoencoderKL.from_pretrained(
                os.path.expanduser(name),
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        # Of a folder that holds something else, diffusers raises anything.
        except Exception as error:
            raise UserError(f"autoencoder {name} cannot be read: {reason_of(error)}") from error
        self.model = model.eval().requires_grad_(False)
        self.factor = 2 ** (len(model.config.block_out_channels) - 1)
        self.channels = int(model.config.latent_channels)
        self.shift = float(model.config.shift_factor or 0)
        self.scale = float(model.config.scaling_factor)

    def to(self, device: torch.device | str) -> Autoencoder:
        """Move it; returns itself."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Means and standard deviations [B, 2, C, h, w] of the latents of images [B, 3, H, W]."""
        found = self.model.encode(images.to(self.model.device)).latent_dist
        return torch.stack(((found.mean - self.shift) * self.scale, found.std * self.scale), dim=1)

    @torch.no_grad()
    def decode(self, latents: Tensor, batch_size: int = 8) -> Tensor:
        """Images [N, 3, H, W] in about -1 … 1, on the CPU, of latents [N, C, h, w]."""
        raw = latents / self.scale + self.shift
        parts = [
            self.model.decode(x.to(self.model.device)).sample.cpu() for x in raw.split(batch_size)
        ]
        return torch.cat(parts)


class LatentImages(Dataset):
    """Latents that are on disk: items ([F, 2, C, h, w], class), F = 2 with the mirrored image.

    Args:
        file: of :func:`cache_latents`.

    Raises:
        DatasetError: the file, or that of the classes, is damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self.moments = np.load(file, mmap_mode="r", allow_pickle=False)
            self.targets = np.load(_targets(file), allow_pickle=False)
        except (ValueError, EOFError) as error:
            told = file.with_suffix(".json")
            raise DatasetError(
                f"the latents of {told} are damaged ({error}); remove it to encode them anew"
            ) from error

    def __reduce__(self) -> tuple:
        # A worker process that is spawned opens the file; pickled, it would come whole.
        return LatentImages, (self.file,)

    def __len__(self) -> int:
        return len(self.moments)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.moments[index].astype(np.float32)), int(self.targets[index])


def latent_items(images: LatentImages, seed: int, *, flip: float | None) -> SeededItems:
    """Items (latent [C, h, w], class, place), as images have them.

    Args:
        images: on disk.
        seed: of what is random.
        flip: draw the latent from its distribution, the mirrored image's with this probability;
            None: the mean of the image's as it is.
    """
    return SeededItems(images, partial(_drawn, flip), seed)


def _drawn(flip: float | None, item: tuple[Tensor, int], index: int) -> tuple[Tensor, int, int]:
    moments, target = item
    if flip is None:
        return moments[0, 0], target, index
    mean, deviation = moments[int(torch.rand(()) < flip)]
    return torch.addcmul(mean, deviation, torch.randn_like(mean)), target, index


def cache_latents(
    folder: Path,
    part: str,
    images: Dataset,
    transform: Transform,
    autoencoder: Autoencoder,
    asked: Mapping[str, Any],
    *,
    mirrored: bool,
    batch_size: int = 32,
) -> LatentImages:
    """Encode a dataset once; what is there of the same settings is read instead.

    Of several processes one encodes, and the others wait for it. Latents are float16.

    Args:
        folder, part: PART.npy and PART-targets.npy are written into the folder, PART.json last.
        images: of PIL images and classes.
        transform: PIL image → tensor [3, H, W] in -1 … 1.
        asked: all that the latents depend on, as JSON has it.
        mirrored: also encode each image mirrored.

    Raises:
        DatasetError: the folder holds latents of other settings or damaged ones, or the images are
            a stream.
        ImageError: an image does not decode.
    """
    if isinstance(images, IterableDataset):
        raise DatasetError("a stream of images has no latents on disk; give a folder")
    asked = {**asked, "images": len(images), "mirrored": mirrored}
    file, told = folder / f"{part}.npy", folder / f"{part}.json"
    with alone_in(folder, wait=True):
        if told.exists():
            try:
                found = read_json(told.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DatasetError(f"{told} is damaged ({error}); remove it") from error
            if found != asked:
                raise DatasetError(
                    f"{told} describes latents with {found}, but {asked} is requested; name another"
                    " folder"
                )
            return LatentImages(file)
        _LOGGER.info("encoding %d images into %s", len(images), file)
        _encode(file, with_transform(images, transform, 0), autoencoder, mirrored, batch_size)
        write_text(told, json.dumps(asked))
    return LatentImages(file)


def _encode(
    file: Path, items: Dataset, autoencoder: Autoencoder, mirrored: bool, batch_size: int
) -> None:
    targets = np.zeros(len(items), dtype=np.int64)
    written = None
    for start in range(0, len(items), batch_size):
        batch = [items[index] for index in range(start, min(start + batch_size, len(items)))]
        for item in batch:
            if isinstance(item, ImageError):
                raise item
        x = torch.stack([image for image, _, _ in batch])
        views = [autoencoder.encode(view) for view in ((x, x.flip(-1)) if mirrored else (x,))]
        moments = torch.stack(views, dim=1).half().cpu().numpy()
        if written is None:
            shape = (len(items), *moments.shape[1:])
            written = np.lib.format.open_memmap(file, "w+", dtype=np.float16, shape=shape)
        written[start : start + len(batch)] = moments
        targets[start : start + len(batch)] = [target for _, target, _ in batch]
    written.flush()
    np.save(_targets(file), targets)


def _targets(file: Path) -> Path:
    return file.with_name(f"{file.stem}-targets.npy")
