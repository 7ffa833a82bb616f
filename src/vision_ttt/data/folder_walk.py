"""The images below a folder, links followed, but not round in circles."""

from __future__ import annotations

import os

from torchvision.datasets.folder import IMG_EXTENSIONS

from vision_ttt.data.shards import DatasetError


def images_below(folder: str) -> list[str]:
    """Return the paths of the images below `folder`, ordered by their folders' paths, then names.

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
        if name.lower().endswith(IMG_EXTENSIONS)
    ]
