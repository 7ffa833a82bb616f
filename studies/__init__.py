"""What measures and compares the models of vision-ttt, from outside; see README.md beside it.

Importing this package registers the studies' own models with timm, and lets the root `letters`
stand for pictures of letters in runs that train a segmenter.
"""

from collections.abc import Mapping
from typing import Any

from studies import models
from vision_ttt.tasks.segmentation import LabelledSet, register_root

__all__ = ["models"]


def _open_letters(options: Mapping[str, Any]) -> LabelledSet:
    from studies.letters.dataset import open_letters  # with PyTorch and SciPy

    return open_letters(options)


register_root("letters", _open_letters)
