"""Sample pictures by name."""

import numpy as np
import pytest

from vision_ttt.data import Digits
from vision_ttt.data.sample_images import SampleError, sample_images


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("china", (640, 427)), ("flower.jpg", (640, 427)), ("digit-7", (32, 32))),
        *(("object-3", (48, 48)), ("scene-0", (128, 128))),
    ],
)
def test_pictures_are_rgb_and_the_same_each_time(name, size):
    (sample,) = sample_images(name)
    assert sample.name == name.removesuffix(".jpg")
    picture = sample.open()
    assert (picture.mode, picture.size) == ("RGB", size)
    assert np.array_equal(picture, sample.open())
    assert np.ptp(np.asarray(picture)) > 50  # something is on it


def test_the_last_figure_of_a_number_is_the_digit():
    digits = Digits("test")
    labelled = zip(digits.images, digits.targets, strict=True)
    own = {image.tobytes(): label for image, label in labelled}
    samples = sample_images("digit-0-479")
    assert [sample.name for sample in samples] == [f"digit-{n}" for n in range(480)]
    assert [own[sample.open().tobytes()] for sample in samples] == [n % 10 for n in range(480)]
    assert len({sample.open().tobytes() for sample in sample_images("digit-0-499")}) == 500


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("chian", "called 'chian'; accepted: china, flower, KIND-N"),
        ("", "no sample picture is called ''"),
        ("digit-x", "KIND among digit, object, scene"),
        ("digit-500", "at most 499 for digit"),
        ("scene-3-1", "numbers must rise"),
        ("scene-99999", "at most 9,999 for scene"),
    ],
)
def test_other_names_are_refused(name, told):
    with pytest.raises(SampleError, match=told):
        sample_images(name)
