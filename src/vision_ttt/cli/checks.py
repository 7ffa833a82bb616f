"""Refusals that commands share, each a UserError of one line; free of PyTorch."""

import difflib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import jsonargparse

from vision_ttt.errors import UserError, shortened
from vision_ttt.file_kinds import is_of_the_system, kind_of_file
from vision_ttt.pretrained import list_pretrained, weights_path

LARGEST_BATCH = 65_536  # images at once; more is a typing error


def check_range(arguments: jsonargparse.Namespace, **ranges: tuple[float, float]) -> None:
    """Check that each argument, and each of a list, lies between two bounds, if it is given."""
    for name, (low, high) in ranges.items():
        value = arguments[name]
        for each in value if isinstance(value, list) else [value]:
            if each is not None and not low <= each <= high:
                raise UserError(
                    f"{flag(name)} is {shortened(each)}; it must be at least {low:,}"
                    f" and at most {high:,}"
                )


def check_input_file(name: str, given: str) -> None:
    """Check that a file is there, and one that can be read to its end: no folder, no pipe."""
    mode = check_readable(name, given)
    if not stat.S_ISREG(mode):
        raise UserError(f"{name} {given} is {kind_of_file(mode)}; a file is needed")


def checkpoint_path(given: str) -> str:
    """Return the path of a checkpoint: a file, timm's folder, or the name of packaged weights."""
    path = weights_path(given)
    packaged = difflib.get_close_matches(given, list_pretrained(), cutoff=0.8)
    if packaged and not Path(path).exists():
        raise UserError(f"no such file and no such weights: {given}; nearest: {packaged[0]}")
    if not stat.S_ISDIR(check_readable("the checkpoint", path)):
        check_input_file("the checkpoint", path)
    elif not Path(path, "config.json").is_file():
        run = Path(path, "last.safetensors")
        accepted = run if run.is_file() else "a file of weights, or a folder with config.json"
        raise UserError(f"the checkpoint {path} is a folder; accepted: {accepted}")
    return path


def check_readable(name: str, given: str) -> int:
    """Check that a file or folder is there and not in /proc or /sys; return its `st_mode`."""
    path = _path(name, given)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise FileNotFoundError(2, "No such file", given) from None
    if is_of_the_system(path):
        raise UserError(f"{name} {given} is in /proc or /sys; name a file or folder of your own")
    return mode


def check_output_file(name: str, given: str, *, suffixes: Sequence[str], overwrite: bool) -> None:
    """Check that a file can be written: a known suffix, in a folder, and not there already.

    Args:
        overwrite: it may be there, if it is a file.
    """
    path = _path(name, given)
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{name} {given} must be a {' or '.join(suffixes)} file")
    if path.exists() or path.is_symlink():
        check_replaceable(name, given, overwrite=overwrite)
    if not path.parent.is_dir():
        raise UserError(f"the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"the folder {path.parent} cannot be written to")


def check_new_folder(name: str, given: str) -> None:
    """Check that a folder and those above it are there or can be made, and be written to."""
    path = _path(name, given).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        raise UserError(f"{name} {given} cannot be made: {there} is no folder")
    if is_of_the_system(there) or not os.access(there, os.W_OK):
        raise UserError(f"{name} {given} cannot be made: {there} cannot be written to")


def check_renewed_file(name: str, given: str | None) -> None:
    """Check that a file that is rewritten or appended to is a regular file or can be created."""
    if given is None:
        return
    path = _path(name, given)
    if path.exists():
        check_replaceable(name, given, overwrite=True)
    else:
        check_new_folder(name, str(path.parent))


def check_replaceable(name: str, given: str, *, overwrite: bool) -> None:
    """Check that what is there is a file, and may be replaced."""
    path = Path(given)
    mode = path.lstat().st_mode if path.is_symlink() and not path.exists() else path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise UserError(f"{name} {given} is {kind_of_file(mode)}; name a file")
    if not overwrite:
        raise UserError(f"{name} {given} already exists; name another file, or give --overwrite")


def flag(name: str) -> str:
    """The flag of an argument as help shows it."""
    return f"--{name.replace('_', '-')}"


def _path(name: str, given: str) -> Path:
    if not given:
        raise UserError(f"{name} is empty; the path of a file is needed")
    return Path(given)
