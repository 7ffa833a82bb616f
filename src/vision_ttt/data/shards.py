"""Folders of webdataset shards: tar files in which KEY.jpg lies beside KEY.cls, its class index.

They are read at any place and not only in order. So they are shuffled whole, divided exactly among
processes and resumed within an epoch as image folders are, but with few large files on the disk.
"""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from PIL import Image
from torch.utils.data import Dataset

from vision_ttt.data.images import LARGEST_IMAGE_FILE, ImageError, open_image
from vision_ttt.errors import UserError, some
from vision_ttt.file_kinds import (
    IMAGE_SUFFIXES,
    UnreadableFile,
    check_regular,
    is_hidden,
    read_regular,
)

CLASSES_FILE = "classes.txt"
"""Beside the shards: the classes' names, one per line, by index."""

_LARGEST_TEXT = 2**24  # bytes
_LONGEST_INDEX = 100  # bytes of a class index; what is longer is none


class DatasetError(UserError, ValueError):
    """A dataset that cannot be used; names it and what is wrong."""


class _Sample(NamedTuple):
    shard: Path
    name: str
    offset: int
    size: int


class ShardImages(Dataset[tuple[Image.Image, int]]):
    """The images of some shards, in the shards' order; items are (RGB PIL image, class index)."""

    def __init__(self, shards: Iterable[Path]) -> None:
        """List the shards' members, which reads their headers only.

        Raises:
            DatasetError: a shard is no file, damaged or without images; an image has no class or
                a key that another one has, or a class has no image.
        """
        self.samples: list[_Sample] = []
        self.targets: list[int] = []
        for shard in shards:
            samples, targets = _read_shard(shard)
            self.samples += samples
            self.targets += targets

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        sample = self.samples[index]
        name = f"{sample.shard}/{sample.name}"
        if sample.size > LARGEST_IMAGE_FILE:
            raise ImageError(
                name, f"it has {sample.size:,} bytes; at most {LARGEST_IMAGE_FILE:,} are accepted"
            )
        try:
            # Opened anew each time: an open file would be one place shared by all worker processes.
            with sample.shard.open("rb") as file:
                file.seek(sample.offset)
                content = file.read(sample.size)
        except OSError as error:
            raise ImageError(name, f"the shard cannot be read: {error.strerror}") from error
        return open_image(io.BytesIO(content), name), self.targets[index]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file in UTF-8, without empty ones at its end.

    Raises:
        DatasetError: it is no file, too large, or no text in UTF-8.
    """
    try:
        return read_regular(path, _LARGEST_TEXT).decode("utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not a text in UTF-8: {error.reason}") from error
    except UnreadableFile as error:
        raise DatasetError(str(error)) from error


def _read_shard(shard: Path) -> tuple[list[_Sample], list[int]]:
    images: dict[str, _Sample] = {}
    classes: dict[str, int] = {}
    try:
        check_regular(shard)
        with tarfile.open(shard, "r:") as tar:  # compressed, its images had no places
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                key, dot, suffix = base.partition(".")
                key = f"{folder}/{key}".removeprefix("/")
                # A key is not empty: file browsers add hidden files such as ._KEY.cls.
                if not member.isfile() or not dot or is_hidden(PurePosixPath(member.name)):
                    continue
                if f".{suffix}".lower() in IMAGE_SUFFIXES:
                    if key in images:
                        raise DatasetError(
                            f"shard {shard}: {images[key].name} and {member.name} have one key; an"
                            " image needs a key of its own"
                        )
                    images[key] = _Sample(shard, member.name, member.offset_data, member.size)
                elif suffix.endswith(".cls"):
                    raise DatasetError(
                        f"shard {shard}: {member.name} belongs to no image, as a key ends at the"
                        " first dot; the name must be KEY.cls"
                    )
                elif suffix == "cls":
                    if member.size > _LONGEST_INDEX:
                        raise ValueError(f"it has {member.size:,} bytes")
                    classes[key] = int(tar.extractfile(member).read())
    except DatasetError:
        raise
    except UnreadableFile as error:
        raise DatasetError(f"shard {error}") from error
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DatasetError(f"shard {shard} is damaged: {error}") from error
    except ValueError as error:
        raise DatasetError(f"shard {shard}: {member.name} holds no class index: {error}") from error
    if not images:
        raise DatasetError(f"shard {shard} has no images (accepted: {', '.join(IMAGE_SUFFIXES)})")
    for key, sample in images.items():
        if key not in classes:
            raise DatasetError(f"shard {shard}: {sample.name} has no .cls file beside it")
    if alone := sorted(classes.keys() - images.keys()):
        raise DatasetError(
            f"shard {shard} has no image beside {some([f'{key}.cls' for key in alone])}; accepted:"
            f" {', '.join(IMAGE_SUFFIXES)}"
        )
    return list(images.values()), [classes[key] for key in images]
