"""Sets of images and masks that other packages add, by the root that stands for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # it needs PyTorch
    from torch.utils.data import Dataset


class LabelledSet(NamedTuple):
    """A set of images with their masks, in two parts."""

    classes: tuple[str, ...]
    """Names of the labels, from 0."""
    train: Dataset
    """Its items are :class:`vision_ttt.data.mask_folders.LabelledImage`."""
    test: Dataset


ROOTS: dict[str, Callable[[Mapping[str, Any]], LabelledSet]] = {}
"""Root → what opens the set that it stands for, given the run's `root_options`."""


def register_root(name: str, open_set: Callable[[Mapping[str, Any]], LabelledSet]) -> None:
    """Let a root stand for the images and masks of another package, in place of a folder.

    Args:
        name: the value of the field `root`. A folder of that name is `./NAME`.
        open_set: a function of the field `root_options`. It raises
            :class:`vision_ttt.data.DatasetError` for an option that it does not accept. Recipes are
            read without PyTorch: import the set's module inside the function.

    Raises:
        ValueError: another set has the name.
    """
    if ROOTS.setdefault(name, open_set) is not open_set:
        raise ValueError(f"there is a set of images and masks {name!r} already")
