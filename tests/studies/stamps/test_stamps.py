"""Cut-outs on photographs: the same pictures each time, exact labels, splits that share nothing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from studies.stamps.cutouts import CLASSES, list_cutouts, list_photographs, load_cutout
from studies.stamps.dataset import open_stamps
from studies.stamps.images import StampPictures, StampSettings
from studies.sweeps import SWEEPS
from studies.sweeps.definition import Panel, Variant
from studies.sweeps.label_pictures import unpacked
from studies.sweeps.letters import LABELS
from studies.sweeps.one_run import Task, perform
from studies.sweeps.stamps import SHOWN, SIDE_SHOWN, stamp_figure
from vision_ttt.data import DatasetError
from vision_ttt.data.images import ImageError
from vision_ttt.errors import UserError

GREY = 128
"""Level of the photographs for training; those for test are a little lighter."""
LIGHTER = 140


def _colour(label: int, *, tested: bool) -> tuple[int, int, int]:
    """Red tells the class, green the split."""
    return (20 * label, 200 if tested else 10, 255)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two folders in the packages' form: opaque ellipses of 60 × 40 pixels, plain photographs."""
    stamps, photographs = (tmp_path_factory.mktemp(name) for name in ("stamps", "photographs"))
    for label, parts in enumerate(CLASSES.values(), 1):
        (stamps / parts[0]).mkdir(parents=True)
        for index in range(4):
            cutout = Image.new("RGBA", (80, 60))
            colour = (*_colour(label, tested=index == 2), 255)
            cutout.paste(Image.new("RGBA", (60, 40), colour), (10, 10))
            cutout.save(stamps / parts[0] / f"{index}.png")
    for index in range(3):
        level = LIGHTER if index == 2 else GREY
        Image.new("RGB", (300, 260), (level,) * 3).save(photographs / f"{index}.jpg")
    return {"stamps": str(stamps), "photographs": str(photographs)}


def _picture(folders: dict[str, str], split: str, index: int = 0, **changes: object):
    return StampPictures(StampSettings(side=256, **folders, **changes), split).render(index)


@pytest.mark.parametrize(("split", "level"), [("train", GREY), ("test", LIGHTER)])
def test_labels_are_the_classes_of_the_pixels(folders: dict[str, str], split: str, level: int):
    seen = set()
    for index in range(12):
        image, labels = _picture(folders, split, index)
        pixels = np.asarray(image).astype(int)
        assert (image.mode, pixels.shape) == ("RGB", (256, 256, 3))
        assert (labels.shape, labels.dtype) == ((256, 256), np.uint8)
        plain = (np.abs(pixels - level) <= 2).all(axis=-1)
        assert (labels[plain] == 0).mean() > 0.99  # a border pixel may happen to be grey
        for label in set(np.unique(labels)) - {0}:
            colour = np.array(_colour(int(label), tested=split == "test"))
            is_class = (np.abs(pixels - colour) <= 2).all(axis=-1)
            # All that has the colour has the label, and all but the blended border the colour.
            assert (labels[is_class] == label).all()
            assert is_class.sum() > 0.85 * (labels == label).sum()
            seen.add(int(label))
    assert seen == set(range(1, len(CLASSES) + 1))


def test_a_picture_depends_on_seed_split_and_index_alone(folders: dict[str, str]):
    own = _picture(folders, "train", 3)
    again = _picture(folders, "train", 3)
    assert own.image.tobytes() == again.image.tobytes()
    assert np.array_equal(own.labels, again.labels)
    for other in (
        _picture(folders, "train", 4),
        _picture(folders, "train", 3, seed=1),
        _picture(folders, "test", 3),
    ):
        assert not np.array_equal(own.labels, other.labels)


def test_splits_share_no_file(folders: dict[str, str]):
    for listed in (
        lambda split: sum(list_cutouts(Path(folders["stamps"]), split), ()),
        lambda split: list_photographs(Path(folders["photographs"]), split),
    ):
        train, test = (set(listed(split)) for split in ("train", "test"))
        assert len(train) > len(test) > 0
        assert not train & test


def test_density_is_the_share_of_cells(folders: dict[str, str]):
    def covered(density: float) -> float:
        pictures = (_picture(folders, "train", index, density=density) for index in range(20))
        return float(np.mean([(picture.labels > 0).mean() for picture in pictures]))

    assert 0 <= covered(0.05) < 0.5 * covered(0.5) < covered(1.0)


def test_cutouts_are_trimmed_and_of_limited_size(folders: dict[str, str], tmp_path: Path):
    assert load_cutout(Path(folders["stamps"]) / "animals/birds/0.png").size == (60, 40)
    Image.new("RGBA", (1000, 500), "red").save(tmp_path / "large.png")
    assert load_cutout(tmp_path / "large.png").size == (256, 128)
    (tmp_path / "damaged.png").write_bytes(b"none")
    with pytest.raises(ImageError, match=r"damaged\.png"):
        load_cutout(tmp_path / "damaged.png")


def test_the_root(folders: dict[str, str]):
    parts = open_stamps({"side": 192, "test_images": 2, **folders})
    assert parts.classes == ("background", *CLASSES)
    assert (len(parts.train), len(parts.test)) == (100_000, 2)
    assert parts.test[1].image.size == (192, 192)
    with pytest.raises(IndexError, match="picture 2 of 2"):
        parts.test[2]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"sides": 256}, "stamps has no 'sides'; nearest: side"),
        ({"side": 64}, "side is 64; it must be a whole number from 192 to 1024"),
        ({"side": 256.0}, "side is 256.0; it must be a whole number"),
        ({"density": 0}, "density is 0; it must be a number from 0.01 to 1"),
        ({"density": True}, "density is True"),
        ({"stamps": 3}, "stamps is 3; it must name a folder"),
        ({"test_images": 0}, "test_images is 0; it must be a whole number above 0"),
        ({"stamps": "nowhere"}, "nowhere: .*tuxpaint-stamps-default"),
        ({"photographs": "nowhere"}, "nowhere: .*mate-backgrounds"),
    ],
)
def test_wrong_options(folders: dict[str, str], option: dict[str, object], message: str):
    with pytest.raises(DatasetError, match=message):
        open_stamps({**folders, **option})


def test_labels_of_a_trained_model_are_in_the_picture(folders: dict[str, str], tmp_path: Path):
    options = {"side": 192, "test_images": 1, **folders}
    fields = {"data.root_options": options, "data.crop_size": 192, "data.shorter_side": 192}
    fields |= {"data.test_shorter_side": 192, "updates": 1, "warmup": 0, "evaluate_every": 1}
    shape = {"patch_size": 16, "img_size": 192, "embed_dim": 32, "depth": 1, "num_heads": 1}
    names = {f"{name}-{SIDE_SHOWN}": LABELS[name] for name in SHOWN}
    models = ("vittt_nano_patch4_32", "conv_deit_nano_patch4_32")
    rows = tuple(
        Variant(row, {**fields, "model": model, "arguments": shape})
        for row, model in zip(names, models, strict=True)
    )
    panel = Panel("all", {label: row for row, label in names.items()})
    sweep = replace(SWEEPS["stamps"], rows=rows, panels=(panel,))
    results = [
        perform(
            Task(
                *("stamps", row.name, sweep.config(row, 0, tmp_path), ("studies",)),
                *(sweep.examine, sweep.accuracy),
            )
        )
        for row in rows
    ]
    for result in results:
        labels = unpacked(result.measured["labels"])
        assert labels.shape == (96, 96)
        assert labels.max() <= len(CLASSES)
        assert result.measured["memory_bytes"] > 0
    with pytest.raises(UserError, match="the picture needs results of conv-deit-512"):
        stamp_figure(sweep, results[:1])
    figure = stamp_figure(sweep, results)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:2] == ["192² pixels", "true labels"]
    assert [title.partition(":")[0] for title in titles[2:]] == list(names.values())
    assert figure.axes[1].images[0].get_array().shape == (192, 192, 3)


def test_every_run_of_the_sweep_resolves(tmp_path: Path):
    sweep = SWEEPS["stamps"]
    for row in sweep.rows:
        config = sweep.config(row, 1, tmp_path)
        side = config.data.root_options["side"]
        assert config.model.arguments["img_size"] == side == int(row.name.rsplit("-", 1)[1])
