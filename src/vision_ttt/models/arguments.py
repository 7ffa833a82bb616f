"""Checks of constructor arguments that models share, made before any part is built."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

_LARGEST_SIDE = 16_384
"""Pixels; a position embedding for more would fill any memory."""

_WHOLE_NUMBERS: dict[str, tuple[int, int]] = {
    "in_chans": (1, 65_536),
    "in_channels": (1, 65_536),
    "num_classes": (0, 10_000_000),
    "embed_dim": (1, 65_536),
    "hidden_size": (1, 65_536),
    "depth": (1, 1_000),
    "num_heads": (1, 65_536),
    "num_registers": (1, 65_536),
    "state": (1, 65_536),
    "stride": (1, 65_536),
    "mini_batch_size": (1, 2**20),  # as many learned numbers per direction and block
}
"""Smallest and largest accepted value of each whole number."""

_RATES = ("drop_rate", "drop_path_rate", "patch_drop_rate", "class_dropout_prob")
"""Probabilities below 1."""

_SWITCHES = ("dynamic_img_size", "dynamic_img_pad", "learn_sigma", "post_norm", "qkv_bias")
"""Truth values."""


def check_arguments(**arguments: Any) -> None:
    """Check arguments of a model, given by their names.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: an argument is of another type.
    """
    for name, value in arguments.items():
        if name in _SWITCHES:
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; accepted: true, false")
        elif name in _RATES:
            _number(name, value)
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value}; accepted: 0 to below 1")
        else:
            _whole_number(name, value, *_WHOLE_NUMBERS[name])


def choose(name: str, value: str, accepted: Collection[str]) -> str:
    """The value of an argument, if it is among the accepted ones.

    Raises:
        ValueError: it is not; names the accepted ones.
    """
    if value not in accepted:
        raise ValueError(f"{name} must be one of {list(accepted)}, got {value!r}")
    return value


def check_sides(
    img_size: int | tuple[int, int],
    patch_size: int | tuple[int, int] = 1,
    *,
    names: tuple[str, str] = ("img_size", "patch_size"),
    whole_patches: bool = True,
    pad: bool = False,
) -> None:
    """Check that an image holds a grid of patches; sizes are in pixels.

    Args:
        img_size: height and width of images, one number for both.
        patch_size: the same of patches.
        names: of these two arguments, for messages.
        whole_patches: require that the image is a whole number of patches.
        pad: the model pads images to whole patches.

    Raises:
        ValueError: a size is out of its range, or the two do not fit.
        TypeError: a size is neither a whole number nor a pair of them.
    """
    image, patch = _pair(names[0], img_size), _pair(names[1], patch_size)
    rests = [side % own for side, own in zip(image, patch, strict=True)]
    too_small = any(side < own for side, own in zip(image, patch, strict=True))
    if not pad and (too_small or (whole_patches and any(rests))):
        raise ValueError(
            f"images of {image[0]} × {image[1]} are not whole patches of {patch[0]} × {patch[1]}"
            f" ({' and '.join(names)})"
        )


def mlp_width(dim: int, mlp_ratio: float) -> int:
    """Hidden width of an MLP, `mlp_ratio` times the model's width.

    Raises:
        ValueError: it is not in 1 … 2^20.
        TypeError: the ratio is not a number.
    """
    _number("mlp_ratio", mlp_ratio)
    if not math.isfinite(mlp_ratio) or not 1 <= round(mlp_ratio * dim) <= 2**20:
        raise ValueError(
            f"mlp_ratio is {mlp_ratio}; of a width of {dim} it must make 1 to {2**20:,} units"
        )
    return round(mlp_ratio * dim)


def _pair(name: str, size: int | tuple[int, int]) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2:
        raise ValueError(f"{name} is {size!r}; accepted: one number, or height and width")
    for side in sides:
        _whole_number(name, side, 1, _LARGEST_SIDE)
    return sides


def _whole_number(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}; accepted: whole numbers, {least} to {most:,}")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; accepted: {least} to {most:,}")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; accepted: numbers")
