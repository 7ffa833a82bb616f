"""Sets of images and masks of another package, by the root that stands for each."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import Dataset

from vision_ttt import recipes
from vision_ttt.cli.main import main
from vision_ttt.data import DatasetError
from vision_ttt.data.mask_folders import open_mask_folders
from vision_ttt.engine import ConfigError
from vision_ttt.tasks.segmentation import LabelledSet, register_root
from vision_ttt.tasks.segmentation.config import ROOTS

sys.path.insert(0, str(Path(__file__).parent))
from segmentation_scenes import CLASSES, write_scenes


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    return write_scenes(tmp_path / "scenes")


@pytest.fixture
def asked(scenes: Path) -> Iterator[list[Mapping[str, Any]]]:
    """The options that the registered set "rectangles" was opened with."""
    seen = []

    def part(name: str) -> Dataset:
        images, masks = scenes / "images" / name, scenes / "annotations" / name
        return open_mask_folders(images, masks, CLASSES, zero_is_unlabelled=True)

    def open_rectangles(options: Mapping[str, Any]) -> LabelledSet:
        if options.keys() - {"colours"}:
            raise DatasetError(f"rectangles have no {[*options]}")
        seen.append(options)
        return LabelledSet(CLASSES, part("training"), part("validation"))

    register_root("rectangles", open_rectangles)
    yield seen
    del ROOTS["rectangles"]


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """Write a recipe of one update with a linear layer on tokens."""

    def write(**data: Any) -> Path:
        sizes = ("crop_size", "shorter_side", "test_shorter_side", "window")
        values = {
            "task": {"name": "segmentation", "maps": "tokens"},
            "data": {**dict.fromkeys(sizes, 32), "stride": 16, **data},
            "model": {
                "name": "vittt_nano_patch4_32",
                "arguments": {"depth": 1, "embed_dim": 32, "num_heads": 1, "patch_size": 8},
            },
            "optimisation": {"updates": 1, "batch_size": 2, "learning_rate": 1e-3},
            "run": {"output": str(tmp_path / "run")},
        }
        path = tmp_path / "rectangles.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def test_a_registered_root_is_trained_on_and_evaluated(
    asked: list, recipe: Callable[..., Path], scenes: Path, tmp_path: Path, no_report: None, capsys
) -> None:
    """By the command, from a recipe's path."""
    path = recipe(root="rectangles", root_options={"colours": 3})
    assert main(["train", str(path), "--root-options.colours", "2"]) == 0
    assert asked == [{"colours": 2}]
    weights = tmp_path / "run" / "last.safetensors"
    capsys.readouterr()
    assert main(["eval", str(weights), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["images"] == 5
    assert asked[1:] == [{"colours": 2}]

    # Another dataset leaves nothing of the root's options.
    assert main(["eval", str(weights), "--dataset", str(scenes), "--json"]) == 0
    assert len(asked) == 2
    assert json.loads(capsys.readouterr().out)["images"] == 5


def test_labels_of_a_registered_root_begin_at_0(
    asked: list, recipe: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    config = recipes.load(str(recipe(root="rectangles")))
    config.task.open(config)._warn_of_absent(torch.zeros(len(CLASSES)))
    assert "the first class is 0" in caplog.text


def test_options_of_what_is_not_registered_are_refused(
    asked: list, recipe: Callable[..., Path], scenes: Path, capsys
) -> None:
    for root in (str(scenes), "rectangle"):
        with pytest.raises(ConfigError, match=r"no registered set; .*: .*rectangles"):
            recipes.load(str(recipe(root=root, root_options={"colours": 3})))
    assert main(["train", str(recipe(root="rectangles", root_options={"hue": 1}))]) == 2
    assert "rectangles have no ['hue']" in capsys.readouterr().err
    assert asked == []


def test_classes_of_a_registered_root_differ(
    asked: list, recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Predicted masks find a class by its name."""
    opened = ROOTS["rectangles"]({})
    twice = opened._replace(classes=(*CLASSES, CLASSES[0]))
    monkeypatch.setitem(ROOTS, "rectangles", lambda options: twice)
    assert main(["train", str(recipe(root="rectangles"))]) == 2
    assert f"rectangles has {CLASSES[0]} more than once" in capsys.readouterr().err


def test_a_root_is_registered_once(asked: list) -> None:
    register_root("rectangles", ROOTS["rectangles"])
    with pytest.raises(ValueError, match="a set of images and masks 'rectangles' already"):
        register_root("rectangles", lambda options: None)
