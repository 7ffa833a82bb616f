"""Sets that are rendered into a folder, part by part: one that was killed goes on where it was.

parts/           while it is unfinished: what was asked for, and what is on the pictures so far
manifest.json    what was rendered; written last
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from PIL import Image

from vision_ttt.data.shards import DatasetError
from vision_ttt.file_kinds import read_regular
from vision_ttt.files import atomic_file

MANIFEST_FILE = "manifest.json"
SHEET_FILE = "sheet.png"
"""Some of the pictures, to look at; it may lie in the folder before the set does."""

_PARTS = "parts"
_PART = 50  # pictures
_LARGEST_FILE = 2**30  # bytes of a JSON file


class Entries(TypedDict):
    """What a COCO file says of some pictures."""

    images: list[dict[str, Any]]
    annotations: list[dict[str, Any]]


def render_folder(
    folder: Path,
    kind: str,
    asked: Mapping[str, Any],
    images: Mapping[str, int],
    render_part: Callable[[Any, range], Entries],
    finish: Callable[[Mapping[str, Entries]], None],
    progress: Callable[[int], None],
) -> None:
    """Render a set into a folder, or go on with one that was interrupted, or find it complete.

    One process at a time; the folder is made where it is missing.

    Args:
        kind: what is on the pictures, in the plural.
        asked: all that the set depends on, as JSON has it.
        images: split → number of its pictures.
        render_part: writes the files of some pictures of a split, and says what is on them.
        finish: writes what is of the whole set, of each split's entries.
        progress: called with the number of pictures that are there, at first and after each part.

    Raises:
        DatasetError: the folder holds a set of other settings, or something else.
        OSError: the folder cannot be written.
    """
    if is_complete(folder, kind, asked):
        progress(sum(images.values()))
        return
    parts = folder / _PARTS
    parts.mkdir(parents=True, exist_ok=True)
    write_json(parts / MANIFEST_FILE, asked)
    written: dict[str, list[Path]] = {split: [] for split in images}
    done = 0
    for split, count in images.items():
        for first in range(0, count, _PART):
            pictures = range(first, min(first + _PART, count))
            part = parts / f"{split}-{first:06d}.json"
            if not part.exists():
                write_json(part, render_part(split, pictures))
            written[split].append(part)
            done += len(pictures)
            progress(done)
    finish({split: _merged(paths) for split, paths in written.items()})
    write_json(folder / MANIFEST_FILE, asked)
    shutil.rmtree(parts)


def is_complete(folder: Path, kind: str, asked: Mapping[str, Any]) -> bool:
    """Whether a folder holds the whole set; False for a part of it, or nothing.

    Args:
        kind, asked: as of :func:`render_folder`.

    Raises:
        DatasetError: it holds something else.
    """
    for manifest, part in ((folder / MANIFEST_FILE, ""), (folder / _PARTS / MANIFEST_FILE, "part")):
        if not manifest.exists():
            continue
        try:
            found = json.loads(read_regular(manifest, _LARGEST_FILE))
        except ValueError as error:
            raise DatasetError(f"{manifest} is damaged: {error}") from error
        if not isinstance(found, dict):
            raise DatasetError(f"{manifest} is damaged: it holds {found!r:.50}, not an object")
        if found != asked:
            keys = sorted(asked.keys() | found.keys())
            differences = ", ".join(
                f"{key} {found.get(key)} (not {asked.get(key)})"
                for key in keys
                if found.get(key) != asked.get(key)
            )
            raise DatasetError(
                f"{folder} holds {'a part of ' if part else ''}another set of {kind}:"
                f" {differences}; choose another folder, or remove it"
            )
        return not part
    if folder.is_dir():
        shown = (each.name for each in folder.iterdir() if not each.name.startswith("."))
        others = sorted({*shown} - {SHEET_FILE})
        if others not in ([], [_PARTS]):  # parts: killed before anything was written
            raise DatasetError(f"{folder} holds no set of {kind}, but {', '.join(others[:5])}")
    return False


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """Return the content of a file of an image, of one of Pillow's formats."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file; see `write_file`."""
    write_file(path, json.dumps(content).encode())


def write_file(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, whenever the process is killed."""
    with atomic_file(path, synced=False) as file:
        file.write(content)


def _merged(parts: Sequence[Path]) -> Entries:
    merged: Entries = {"images": [], "annotations": []}
    for path in parts:
        part = json.loads(read_regular(path, _LARGEST_FILE))
        merged["images"] += part["images"]
        merged["annotations"] += part["annotations"]
    return merged
