"""Options of sets of rendered pictures, which a recipe names as its root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from vision_ttt.data.shards import DatasetError
from vision_ttt.errors import suggestions

Settings = TypeVar("Settings")

TRAIN_IMAGES = 100_000
"""Pictures of a split for training, where an option does not say: an epoch that does not end."""


def read_root_options(
    name: str,
    options: Mapping[str, Any],
    settings_type: type[Settings],
    *,
    test_images: int,
    others: tuple[str, ...] = (),
) -> tuple[Settings, int, int]:
    """Return the settings of a set, and the numbers of its training and test pictures.

    Args:
        name: of the set, for messages.
        options: fields of the settings, `train_images`, `test_images`, and the others.
        settings_type: a dataclass that checks its values.
        test_images: where the options do not say.
        others: names of options that the caller reads.

    Raises:
        DatasetError: an option is unknown or its value is not accepted.
    """
    known = [field.name for field in fields(settings_type)]
    accepted = [*known, "train_images", "test_images", *others]
    for option in options:
        if option not in accepted:
            raise DatasetError(f"{name} has no {option!r}; {suggestions(option, accepted)}")
    counts = {"train_images": TRAIN_IMAGES, "test_images": test_images}
    for option in counts:
        count = counts[option] = options.get(option, counts[option])
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise DatasetError(f"{option} is {count!r}; it must be a whole number above 0")
    try:
        settings = settings_type(**{each: options[each] for each in known if each in options})
    except ValueError as error:
        raise DatasetError(f"{name}: {error}") from error
    return settings, counts["train_images"], counts["test_images"]
