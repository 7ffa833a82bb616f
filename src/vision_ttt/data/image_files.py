"""Image files as a dataset, to predict for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from torch.utils.data import Dataset

from vision_ttt.data.folder_walk import find_images
from vision_ttt.data.images import open_listed


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
