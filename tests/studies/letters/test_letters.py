"""Pictures of letters: the same ones each time, and labelled as the mark says."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from PIL import ImageFont
from torch.utils.data import DataLoader

from studies.letters import images as letter_images
from studies.letters.dataset import LetterImages, open_letters
from studies.letters.fonts import FONTS, SPLITS, load_font
from studies.letters.images import (
    ALPHABET,
    Letter,
    LetterPicture,
    LetterSettings,
    fill_outline,
    render_letters,
)
from studies.letters.sheet import letter_sheet
from vision_ttt.data import DatasetError
from vision_ttt.data.mask_folders import LabelledImage

SETTINGS = LetterSettings(side=128, classes=6, seed=3)
PICTURES = [render_letters(SETTINGS, split, index) for split in SPLITS for index in range(8)]


def _letters() -> Iterator[tuple[LetterPicture, Letter]]:
    return ((picture, letter) for picture in PICTURES for letter in picture.letters)


def _content(picture: LetterPicture) -> tuple[bytes, bytes, list]:
    told = [(*each[:1], each.outline.tolist(), *each[2:]) for each in picture.letters]
    return picture.image.tobytes(), picture.labels().tobytes(), told


def _is_cool(pixels: np.ndarray) -> bool:
    """Whether most of the bright and vivid pixels [N, 3] are rather blue than red."""
    pixels = pixels.astype(int)
    high, low = pixels.max(axis=1), pixels.min(axis=1)
    vivid = pixels[(high > 150) & (high - low > 0.5 * high)]
    return bool((vivid[:, 2] > vivid[:, 0]).mean() > 0.5)


def _hull(letter: Letter) -> np.ndarray:
    canvas = letter_images.Image.new("L", (SETTINGS.side,) * 2)
    fill_outline(canvas, letter, 1)
    return np.asarray(canvas) > 0


def test_a_picture_depends_on_seed_split_and_index_alone():
    content = _content(render_letters(SETTINGS, "test", 5))
    assert content == _content(PICTURES[21])
    others = [(SETTINGS, "test", 6), (SETTINGS, "train", 5)]
    others.append((LetterSettings(side=128, classes=6, seed=4), "test", 5))
    kinds = [(letter.label, letter.counts) for letter in PICTURES[21].letters]
    for other in map(render_letters, *zip(*others, strict=True)):
        assert content[0] != other.image.tobytes()
        assert kinds != [(letter.label, letter.counts) for letter in other.letters]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_is_the_same_in_any_order_and_process(workers: int):
    pictures = LetterImages(SETTINGS, "validation", 6)
    loader = DataLoader(
        pictures, sampler=[5, 0, 3], batch_size=None, collate_fn=_as_it_is, num_workers=workers
    )
    for item, index in zip(loader, (5, 0, 3), strict=True):
        assert item.image.tobytes() == PICTURES[8 + index].image.tobytes()
        assert np.array_equal(item.labels, PICTURES[8 + index].labels())
    assert len(pictures) == 6
    for index in (-1, 6):
        with pytest.raises(IndexError, match=f"picture {index} of 6"):
            pictures[index]


def _as_it_is(item: LabelledImage) -> LabelledImage:
    return item


def test_splits_have_fonts_of_other_families(monkeypatch: pytest.MonkeyPatch):
    families = {
        split: {load_font(name, 20).getname()[0] for name in FONTS[split]} for split in SPLITS
    }
    assert not any(families[one] & families[other] for one, other in combinations(SPLITS, 2))
    drawn = {split: set() for split in SPLITS}
    for split in SPLITS:
        monkeypatch.setattr(
            letter_images,
            "load_font",
            lambda name, size, own=drawn[split]: own.add(name) or load_font(name, size),
        )
        for index in range(4):
            render_letters(SETTINGS, split, index)
    assert all(len(drawn[split]) > 2 and drawn[split] <= set(FONTS[split]) for split in SPLITS)
    with pytest.raises(FileNotFoundError, match="without this font"):
        load_font("Papyrus", 20)


MARK = SETTINGS.mark_side


def test_letters_count_that_have_the_marks_ink():
    """As the pixels say."""
    counting = []
    for picture, letter in _letters():
        pixels = np.asarray(picture.image)
        left, top = (round(middle - MARK / 2) for middle in picture.mark)
        mark = pixels[top + 3 : top + MARK - 3, left + 3 : left + MARK - 3].reshape(-1, 3)
        assert _is_cool(mark) == (picture.ink == 1)
        assert letter.counts == (_is_cool(pixels[_hull(letter)]) == _is_cool(mark))
        counting.append(letter.counts)
    assert 0.3 < np.mean(counting) < 0.7


def test_without_the_mark_all_letters_count_on_the_same_picture():
    own = render_letters(replace(SETTINGS, by_mark=False), "test", 5)
    assert own.image.tobytes() == PICTURES[21].image.tobytes()
    assert [each._replace(counts=False, outline=None) for each in own.letters] == [
        each._replace(counts=False, outline=None) for each in PICTURES[21].letters
    ]
    assert all(letter.counts for letter in own.letters)
    assert not all(letter.counts for letter in PICTURES[21].letters)
    with pytest.raises(ValueError, match="by_mark is 0; it must be true or false"):
        replace(SETTINGS, by_mark=0)


def test_labels_are_the_hulls_of_letters_that_count():
    for picture in PICTURES:
        expected = np.zeros((SETTINGS.side,) * 2, np.uint8)
        for letter in picture.letters:
            if letter.counts:
                expected[_hull(letter)] = letter.label + 1
        assert np.array_equal(picture.labels(), expected)


def test_letters_lie_within_the_picture_and_know_their_distance():
    for picture, letter in _letters():
        assert letter.outline.min() >= 0
        assert letter.outline.max() < SETTINGS.side
        assert 0 <= letter.label < SETTINGS.classes
        middle = letter.outline.mean(axis=0)
        assert letter.distance == pytest.approx(np.hypot(*(middle - picture.mark)))
        assert letter.distance > MARK / 2  # the mark has its corner to itself


def test_one_letter_has_a_ring():
    rows, columns = np.mgrid[: SETTINGS.side, : SETTINGS.side]
    for picture in PICTURES:
        (ringed,) = (letter for letter in picture.letters if letter.is_ringed)
        assert picture.ringed == ringed.label
        is_white = np.asarray(picture.image).min(axis=2) > 200
        for letter in picture.letters:
            x, y = (letter.outline.min(axis=0) + letter.outline.max(axis=0)) / 2
            inside = np.linalg.norm(letter.outline - (x, y), axis=1).max()
            away = np.hypot(columns - x, rows - y) - inside
            is_ringed = is_white[(away > 0.5) & (away < 2)].mean() > 0.5
            assert is_ringed == letter.is_ringed


def test_letters_keep_their_size_and_the_mark_its_share_on_any_canvas():
    heights = {}
    for side, count in ((128, 60), (1024, 1)):
        settings = LetterSettings(side=side)
        extent = settings.mark_side
        assert extent == side // 8
        pictures = [render_letters(settings, "test", index) for index in range(count)]
        outlines = [letter.outline for picture in pictures for letter in picture.letters]
        assert len(outlines) > 250
        heights[side] = np.mean([np.ptp(outline[:, 1]) + 1 for outline in outlines])
        mark = pictures[0].mark
        assert set(mark) <= {2 + extent / 2, side - 2 - extent / 2}
        left, top = (round(middle - extent / 2) for middle in mark)
        pixels = np.asarray(pictures[0].image).astype(int).min(axis=2)
        frame = pixels[top : top + extent, left : left + extent]
        for edge in (frame[0], frame[-1], frame[:, 0], frame[:, -1]):
            assert (edge > 200).all()
        around = pixels[top - 1 : top + extent + 1, left - 1 : left + extent + 1]
        for edge in (around[0], around[-1], around[:, 0], around[:, -1]):
            assert edge[1:-1].mean() < 150
    assert heights[128] == pytest.approx(heights[1024], abs=0.7)
    assert heights[1024] == pytest.approx(28, abs=4)  # turned letters are higher


@pytest.mark.parametrize(
    "values",
    [
        {"side": 63},
        {"side": 256.0},
        {"classes": 1},
        {"classes": len(ALPHABET) + 1},
        {"glyph": 11},
        {"glyph": True},
        {"density": 0},
        {"density": 1.01},
        {"density": "half"},
        {"clutter": -0.1},
        {"clutter": float("nan")},
        {"seed": -1},
        {"mark": 7},
        {"mark": 129},
    ],
)
def test_settings_out_of_range_are_named(values: dict):
    ((name, value),) = values.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be"):
        LetterSettings(**values)


def test_a_canvas_needs_room_for_two_letters():
    with pytest.raises(ValueError, match="side is 64; letters of glyph 28 need at least 84"):
        LetterSettings(side=64)
    assert LetterSettings(side=84).cell == 42


def test_the_mark_leaves_room_for_a_letter():
    for settings, most in (({"side": 84}, 39), ({"side": 64, "glyph": 21}, 29)):
        widest = LetterSettings(**settings, mark=most)
        for index in range(4):
            assert render_letters(widest, "train", index).letters
        with pytest.raises(ValueError, match=f"mark is {most + 1}; .* from 8 to {most} on"):
            LetterSettings(**settings, mark=most + 1)


def test_letters_stand_where_pillow_alone_puts_them():
    assert load_font("STIXGeneral", 30).layout_engine == ImageFont.Layout.BASIC


def test_open_letters():
    classes, train, test = open_letters({"side": 96, "classes": 3, "test_images": 5})
    assert (train.split, len(train)) == ("train", 100_000)
    assert (test.split, len(test)) == ("test", 5)
    assert train.settings == test.settings == LetterSettings(side=96, classes=3)
    assert classes == train.classes == ("background", "A", "E", "H")
    validation = open_letters({"test_split": "validation", "test_images": 7}).test
    assert (validation.split, len(validation)) == ("validation", 7)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sides": 96}, "no 'sides'; nearest: side"),
        ({"test_split": "train"}, "test_split is 'train'; accepted: validation, test"),
        ({"train_images": 0}, "train_images is 0"),
        ({"test_images": 2.5}, "test_images is 2.5"),
        ({"test_split": "validation", "test_images": True}, "test_images is True"),
        ({"side": "256", "mark": 16}, "letters: side is '256'; it must be a whole number"),
        ({"mark": "16"}, "letters: mark is '16'; it must be a whole number from 8 to 128"),
        ({"glyph": 500}, "letters: glyph is 500; it must be a whole number from 12 to 128"),
    ],
)
def test_wrong_options_are_named(options: dict, told: str):
    with pytest.raises(DatasetError, match=told):
        open_letters(options)


def test_sheet_shows_pictures_above_their_labels():
    colours = [(20 * n, 2 * n, n) for n in range(7)]
    sheet = letter_sheet(SETTINGS, colours)
    step = 128 + 4
    assert sheet.size == (6 * step - 4, 6 * step - 4)
    for row, split in enumerate(SPLITS):
        picture = PICTURES[SPLITS.index(split) * 8 + 1]
        top = 2 * row * step
        shown = sheet.crop((step, top, step + 128, top + 128))
        assert shown.tobytes() == picture.image.tobytes()
        labels = np.asarray(sheet.crop((step, top + step, step + 128, top + step + 128)))[..., 2]
        assert np.array_equal(labels, picture.labels())
