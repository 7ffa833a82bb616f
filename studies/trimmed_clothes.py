"""Fashion-MNIST trimmed to the clothes: pictures of many proportions, as they are and as squares.

python -m studies.trimmed_clothes runs/trimmed-clothes
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageOps

from vision_ttt.cli.plain_console import plain_console
from vision_ttt.data.fashion_mnist import FashionMNIST
from vision_ttt.errors import UserError

_DARK = 32
"""Grey level below which a pixel is background."""
_SIDE = 28
_SPLITS = {"train": "train", "test": "val"}


def trimmed(picture: Image.Image) -> Image.Image:
    """Return the smallest part of a picture with all that is not dark; all of a dark one."""
    grey = picture.convert("L").point(lambda level: level if level >= _DARK else 0)
    return picture.crop(grey.getbbox())


WAYS: Mapping[str, Callable[[Image.Image], Image.Image]] = {
    "native": lambda picture: picture,
    "squeezed": lambda picture: picture.resize((_SIDE, _SIDE), Image.Resampling.BICUBIC),
    "padded": lambda picture: ImageOps.pad(picture, (_SIDE, _SIDE), Image.Resampling.BICUBIC),
}
"""Sub-folder → what becomes of a trimmed picture."""


def write_clothes(folder: Path, counts: Mapping[str, int], root: str | None = None) -> None:
    """Write an image folder for each of `WAYS`, all or none.

    Args:
        folder: a new one.
        counts: of the first pictures of "train" and of "test".
        root: as of :class:`FashionMNIST`.

    Raises:
        UserError: the folder is there, or Fashion-MNIST has fewer pictures.
        FileNotFoundError, OSError: Fashion-MNIST is not there; the folder cannot be written.
    """
    if folder.exists():
        raise UserError(f"{folder} is there already; remove it, or choose another folder")
    sets = {split: FashionMNIST(split, root) for split in _SPLITS}
    for split, clothes in sets.items():
        if not 1 <= counts[split] <= len(clothes):
            raise UserError(
                f"{counts[split]} pictures for {split} are asked for; accepted: 1 to"
                f" {len(clothes):,}"
            )
    part = folder.with_name(f".{folder.name}.part")
    if part.exists():  # left by a process that was killed
        shutil.rmtree(part)
    for split, place in _SPLITS.items():
        clothes = sets[split]
        for way, name in ((way, name) for way in WAYS for name in clothes.classes):
            (part / way / place / name).mkdir(parents=True)
        for index in range(counts[split]):
            picture, label = clothes[index]
            own = trimmed(picture)
            for way, make in WAYS.items():
                name = clothes.classes[label]
                make(own).save(part / way / place / name / f"{index:05d}.png")
    os.replace(part, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folders."""
    parser = argparse.ArgumentParser(prog="python -m studies.trimmed_clothes")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--train-images", type=int, default=12_000)
    parser.add_argument("--test-images", type=int, default=2_000)
    arguments = parser.parse_args(argv)
    counts = {"train": arguments.train_images, "test": arguments.test_images}
    try:
        write_clothes(arguments.folder, counts)
    except (UserError, OSError) as error:
        parser.error(str(error))
    plain_console().print(f"{', '.join(WAYS)} in {arguments.folder}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
