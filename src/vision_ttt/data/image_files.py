"""The images below a folder, with links followed but not in a loop; image files as a dataset."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from torch.utils.data import Dataset

from vision_ttt.data.images import open_listed
from vision_ttt.data.shards import DatasetError
from vision_ttt.file_kinds import IMAGE_SUFFIXES, is_of_the_system


class ImageFiles(Dataset[Image.Image]):
    """The RGB images of files; one that does not decode raises an ImageError."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Image.Image:
        return open_listed(self.files[index])


def files_and_folders(given: Sequence[str]) -> list[Path]:
    """Return the files that are given, and all images in the folders that are given.

    Raises:
        DatasetError, OSError: as `find_images`.
    """
    paths = map(Path, given)
    return [file for path in paths for file in (find_images(path) if path.is_dir() else [path])]


def find_images(folder: str | Path) -> list[Path]:
    """Return all image files below `folder`, sorted; links are followed, hidden entries left out.

    Raises:
        DatasetError: there are none, the folder is in /proc or /sys, or links have no end.
        OSError: there is no such folder, or one cannot be read.
    """
    if is_of_the_system(Path(folder)):  # where links lead to everything
        raise DatasetError(f"the folder {folder} is in /proc or /sys, which are not searched")
    paths = sorted(path for path in map(Path, images_below(str(folder))) if path.is_file())
    if not paths:
        raise DatasetError(
            f"no image in the folder {folder} (accepted: {', '.join(IMAGE_SUFFIXES)})"
        )
    return paths


def images_below(folder: str) -> list[str]:
    """Return the paths of the images below `folder`, ordered by their folders' paths, then names.

    Hidden files and folders, whose names begin with a dot, are left out: copies of images among
    them (.thumbnails, ._x.jpg) are made by programs.

    Raises:
        DatasetError: a link leads to a folder that it lies in, so that there would be no end.
        OSError: a folder cannot be read.
    """
    names: dict[str, list[str]] = {}
    waiting = [(folder, (os.path.realpath(folder),))]
    while waiting:
        place, around = waiting.pop()  # `around`: the real paths of `place` and what is above it
        names[place] = []
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if not entry.is_dir():
                    names[place].append(entry.name)
                    continue
                real = os.path.join(around[-1], entry.name)
                if entry.is_symlink():
                    real = os.path.realpath(entry.path)
                    if any(os.path.commonpath((real, each)) == real for each in around):
                        raise DatasetError(
                            f"the link {entry.path} leads to a folder that it lies in"
                        )
                waiting.append((entry.path, (*around, real)))
    return [
        os.path.join(place, name)
        for place in sorted(names)
        for name in sorted(names[place])
        if name.lower().endswith(IMAGE_SUFFIXES)
    ]
