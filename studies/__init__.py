"""What measures and compares the models of vision-ttt, from outside; see README.md beside it.

Importing this package registers the studies' own models with timm, and lets the roots `letters` and
`stamps` stand for pictures that are made on the fly in runs that train a segmenter.
"""

from collections.abc import Mapping
from typing import Any

from studies import models
from vision_ttt.tasks.segmentation import LabelledSet, register_root

__all__ = ["models"]


def _open_letters(options: Mapping[str, Any]) -> LabelledSet:
    from studies.letters.dataset import open_letters  # with PyTorch and SciPy

    return open_letters(options)


def _open_stamps(options: Mapping[str, Any]) -> LabelledSet:
    from studies.stamps.dataset import open_stamps  # with PyTorch

    return open_stamps(options)


register_root("letters", _open_letters)
register_root("stamps", _open_stamps)
