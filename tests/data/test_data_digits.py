"""The handwritten digits: sizes, labels, and a split that never moves."""

import numpy as np
import pytest

from vision_ttt.data import Digits


@pytest.fixture(scope="module")
def parts() -> tuple[Digits, Digits]:
    return Digits("train"), Digits("test")


def test_sizes_and_images(parts: tuple[Digits, Digits]) -> None:
    train, test = parts
    assert (len(train), len(test)) == (1297, 500)
    image, target = test[0]
    assert (image.size, image.mode) == ((32, 32), "RGB")
    assert isinstance(target, int)


def test_split_is_stratified(parts: tuple[Digits, Digits]) -> None:
    for part in parts:
        shares = np.bincount(part.targets, minlength=10) / len(part)
        assert np.abs(shares - 0.1).max() < 0.006


def test_split_is_fixed_and_disjoint(parts: tuple[Digits, Digits]) -> None:
    train, test = parts
    assert Digits("test").targets == test.targets
    pixels = {image.tobytes() for image in train.images}
    assert not any(image.tobytes() in pixels for image in test.images)


def test_unknown_split_is_named() -> None:
    with pytest.raises(ValueError, match="validation"):
        Digits("validation")
