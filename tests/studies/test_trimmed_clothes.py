"""Clothes trimmed to their own proportions, in folders that a classifier reads."""

import pytest
from PIL import Image

from studies import trimmed_clothes
from studies.trimmed_clothes import WAYS, main, trimmed
from vision_ttt.data import DatasetSpec, open_dataset


class Clothes(list):
    """Pictures 8 pixels wide and 20 high on a nearly black ground, of two classes in turns."""

    classes = ("coat", "dress")

    def __init__(self, split: str, root: str | None) -> None:
        picture = Image.new("RGB", (28, 28), (20, 20, 20))
        picture.paste((200, 90, 40), (5, 3, 13, 23))
        super().__init__((picture, index % 2) for index in range({"train": 6, "test": 4}[split]))


def test_each_way_is_a_folder_with_both_parts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trimmed_clothes, "FashionMNIST", Clothes)
    folder = tmp_path / "clothes"
    left = tmp_path / ".clothes.part" / "native"  # by a process that was killed
    left.mkdir(parents=True)
    argv = [str(folder), "--train-images", "5", "--test-images", "3"]
    assert main(argv) == 0
    sizes = {"native": (8, 20), "squeezed": (28, 28), "padded": (28, 28)}
    for way in WAYS:
        data = open_dataset(DatasetSpec(str(folder / way)))
        assert (len(data.train), len(data.test), data.classes) == (5, 3, Clothes.classes)
        assert {image.size for image, _ in data.train} == {sizes[way]}
    squeezed, padded = (
        Image.open(folder / way / "val/coat/00000.png") for way in sizes if way[0] != "n"
    )
    assert squeezed.getpixel((1, 1)) == (200, 90, 40)
    assert padded.getpixel((1, 1)) == (0, 0, 0)
    assert padded.getpixel((14, 1)) == (200, 90, 40)
    for wrong, told in (
        (argv, "is there already"),
        ([str(tmp_path / "x"), *argv[1:4], "5"], "1 to 4"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
        assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["clothes"]


def test_a_dark_picture_stays_whole():
    assert trimmed(Image.new("RGB", (28, 28), (20, 20, 20))).size == (28, 28)
