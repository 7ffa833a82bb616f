"""`python -m studies letters`: a set in a folder, and a picture of it."""

import inspect
from pathlib import Path

import pytest

from studies.cli.arguments.letters import RANGES
from studies.letters.folders import LetterSet
from studies.letters.images import LetterSettings
from studies.main import main
from vision_ttt.engine.locks import alone_in

SIZE = ["--side", "96", "--classes", "3", "--glyph", "18"]
COUNTS = ["--train-images", "4", "--validation-images", "2", "--test-images", "3"]


def test_letters_renders_a_set_after_its_sheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    assert main(["letters", str(folder), *SIZE, "--sheet-only"]) == 0
    assert [path.name for path in folder.iterdir()] == ["sheet.png"]
    sheet = (folder / "sheet.png").read_bytes()
    assert sheet.startswith(b"\x89PNG")
    for _ in range(2):  # the second time it is there
        assert main(["letters", str(folder), *SIZE, *COUNTS]) == 0
        assert f"letters in {folder}" in capsys.readouterr().err
    names = {"ade", "coco", "manifest.json", "ringed", "sheet.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "sheet.png").read_bytes() == sheet
    for part, count in (("train", 4), ("dev", 2), ("val", 3)):
        assert len(list((folder / "ringed" / part).glob("*/*.png"))) == count
    for flags in ([], ["--sheet-only"]):
        argv = ["letters", str(folder), *SIZE, *COUNTS, "--clutter", "0.25", "--seed", "2", *flags]
        assert main(argv) == 2
        assert "clutter 0.5 (not 0.25), seed 0 (not 2)" in capsys.readouterr().err
    assert (folder / "sheet.png").read_bytes() == sheet


def test_one_process_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with alone_in(tmp_path, wait=False):
        assert main(["letters", str(tmp_path), *SIZE, *COUNTS]) == 2
    assert "another process renders letters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--side", "9000"], "--side is 9000; it must be at least 64 and at most 8,192"),
        (["--classes", "26"], "--classes is 26"),
        (["--density", "0"], "--density is 0"),
        (["--clutter", "nan"], "--clutter is 'nan'; it must be a number"),
        (["--test-images", "0"], "--test-images is 0"),
        (["--side", "64"], "side is 64; letters of glyph 28 need at least 84"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main(["letters", str(tmp_path / "set"), *flags]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_arguments_are_those_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(
        "studies.cli.letters.holds_letters", lambda folder, each: asked.append(each)
    )
    monkeypatch.setattr("studies.cli.letters._draw_sheet", lambda *given: None)
    assert main(["letters", str(tmp_path), "--sheet-only"]) == 0
    assert asked == [LetterSet()]
    switches = {"by_mark"}  # of studies, not of the command
    assert set(RANGES) == set(inspect.signature(LetterSettings).parameters) - switches
    large = {"side": 8192}  # on which letters of any size have room
    for name, bounds in RANGES.items():
        for bound, beyond in zip(bounds, (-1, 1), strict=True):
            fitting = {"glyph": 12} if name == "side" else large
            LetterSettings(**{**fitting, name: bound})
            with pytest.raises(ValueError, match=f"{name} is"):
                LetterSettings(**{**fitting, name: bound + beyond})
