"""Sample pictures that come with the installed packages, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from PIL import Image

from vision_ttt.data.digits import TEST_IMAGES, Digits
from vision_ttt.data.scene_images import render_object, render_scene
from vision_ttt.errors import UserError

PHOTOGRAPHS = ("china", "flower")
"""Scikit-learn's photographs, 640 × 427 pixels."""
SERIES = ("digit", "object", "scene")
"""Numbered pictures, those of the test sets of `vision-ttt demo` and `demo-dense`."""
MOST_OF_SERIES = 10_000
OBJECT_SIDE, SCENE_SIDE = 48, 128
"""Pixels, as `vision-ttt demo-dense` renders them."""

_SERIES = re.compile(rf"({'|'.join(SERIES)})-(\d{{1,5}})(?:-(\d{{1,5}}))?")


class SampleError(UserError, ValueError):
    """There is no sample picture of a name."""


class NamedImage(NamedTuple):
    """A picture that is decoded, or drawn, when it is needed."""

    name: str
    open: Callable[[], Image.Image]
    """Returns the RGB picture."""


def sample_images(name: str) -> list[NamedImage]:
    """Return the sample pictures of a name.

    Names are

    - ``china`` and ``flower``, scikit-learn's photographs;
    - ``digit-N``, a test image of the handwritten digits, 32 × 32 pixels. The classes take turns,
      so that the last figure of N is the digit, up to 479. Some classes have none left then;
    - ``object-N`` and ``scene-N``, rendered test pictures of 48 × 48 and 128 × 128 pixels;
    - ``KIND-N-M``, all from N to M, e.g. ``digit-0-9``.

    Raises:
        SampleError: there is no such picture.
    """
    photograph = name.removesuffix(".jpg")
    if photograph in PHOTOGRAPHS:
        return [NamedImage(photograph, partial(_photograph, photograph))]
    match = _SERIES.fullmatch(name)
    if match is None:
        raise SampleError(
            f"no sample picture is called {name!r}; accepted: {', '.join(PHOTOGRAPHS)}, KIND-N and"
            f" KIND-N-M with KIND among {', '.join(SERIES)}"
        )
    kind, first = match[1], int(match[2])
    last = first if match[3] is None else int(match[3])
    count = TEST_IMAGES if kind == "digit" else MOST_OF_SERIES
    if not first <= last < count:
        raise SampleError(
            f"sample pictures {name!r}: numbers must rise, and be at most {count - 1:,} for {kind}"
        )
    draw = {"digit": _digit, "object": _object, "scene": _scene}[kind]
    return [NamedImage(f"{kind}-{n}", partial(draw, n)) for n in range(first, last + 1)]


def _photograph(name: str) -> Image.Image:
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image(f"{name}.jpg"))


def _digit(number: int) -> Image.Image:
    return _test_digits().images[_turns()[number]]


def _object(number: int) -> Image.Image:
    return render_object(0, "test", number, OBJECT_SIDE)[0]


def _scene(number: int) -> Image.Image:
    return render_scene(0, "test", number, SCENE_SIDE).image


@cache
def _test_digits() -> Digits:
    return Digits("test")


@cache
def _turns() -> list[int]:
    """Places of the test digits, the classes taking turns; those left over at the end."""
    targets = _test_digits().targets
    groups = [[i for i, target in enumerate(targets) if target == label] for label in range(10)]
    fewest = min(map(len, groups))
    turns = [group[turn] for turn in range(fewest) for group in groups]
    return turns + sorted(set(range(len(targets))) - set(turns))
