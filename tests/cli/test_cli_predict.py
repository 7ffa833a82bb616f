"""predict on folders: batches, files written, devices."""

import csv
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from described_models import describe_classifier
from vision_ttt.cli.main import main
from vision_ttt.data import evaluation_transform, open_image
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import save_weights
from vision_ttt.tasks import load_model
from vision_ttt.tasks.classification.predict import ClassPredictor
from vision_ttt.tasks.images.models import data_config
from vision_ttt.tasks.images.predicting import Prediction

Said = pytest.CaptureFixture[str]


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    torch.manual_seed(0)
    arguments = {"num_classes": 3, "depth": 1, "embed_dim": 32, "num_heads": 1, "img_size": 16}
    model = build_model("vittt_nano_patch4_32", arguments)
    with torch.no_grad():
        model.head.weight.normal_()
    classes = ("dark", "[red]", "with, comma")
    metadata = describe_classifier(
        "vittt_nano_patch4_32", arguments, classes, data_config(model, 16)
    )
    path = tmp_path / "last.safetensors"
    save_weights(path, model.state_dict(), metadata)
    return str(path)


def _expected(checkpoint: str, path: str) -> list[tuple[str, float]]:
    """Classes and probabilities of one image by itself, best first."""
    model, metadata = load_model(checkpoint)
    image = evaluation_transform(metadata.carried["input"])(open_image(path))
    with torch.inference_mode():
        probabilities = model(image[None]).softmax(-1)[0].tolist()
    named = zip(metadata.carried["classes"], probabilities, strict=True)
    return sorted(named, key=lambda pair: -pair[1])


@pytest.mark.parametrize("workers", ["0", "1"])
def test_csv_and_json_tell_what_each_image_gives_by_itself(
    checkpoint: str, image_folder: Path, tmp_path: Path, workers: str, capsys: Said
) -> None:
    bad = image_folder / "val" / "dark" / "1.png"
    bad.write_bytes(b"\x89PNG")
    folder = str(image_folder / "val")
    command = ["predict", folder, "--checkpoint", checkpoint, "--topk", "2"]
    command += ["--batch_size", "3", "--num_workers", workers]
    assert main(command) == 2
    assert "; --skip-bad leaves out what cannot be read" in capsys.readouterr().err
    command.append("--skip-bad")
    for name in ("out.csv", "out.json"):
        assert main([*command, "--output", str(tmp_path / name)]) == 0
        said = capsys.readouterr()
        assert f"skipped: cannot decode image {bad}" in said.err
        assert "1 of 8 images skipped" in said.err
        assert "7 images" in said.out
    answer = json.loads((tmp_path / "out.json").read_text())
    assert answer["skipped"] == [str(bad)]
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["image", "class_1", "probability_1", "class_2", "probability_2"]
    assert [row["image"] for row in rows] == sorted({row["image"] for row in rows})
    assert len(rows) == len(answer["predictions"]) == 7
    for row, prediction in zip(rows, answer["predictions"], strict=True):
        assert row["image"] == prediction["image"]
        expected = _expected(checkpoint, row["image"])[:2]
        for rank, (name, probability) in enumerate(expected, start=1):
            entry = prediction["top"][rank - 1]
            assert row[f"class_{rank}"] == entry["class"] == name
            assert float(row[f"probability_{rank}"]) == entry["probability"]
            assert entry["probability"] == pytest.approx(probability, abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--device", "tpu9"], "device 'tpu9' cannot be used"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--output", "out.txt"], "must be a .csv or .json file"),
        (["--output", "no/such/out.csv"], "does not exist"),
        (["--batch_size", "0"], "--batch-size is 0"),
        (["--topk", "0"], "topk is 0"),
        (["missing.png", "--num_workers", "1"], "missing.png"),
    ],
)
def test_wrong_arguments(
    checkpoint: str, image_folder: Path, flags: list[str], told: str, capsys: Said
) -> None:
    image = str(image_folder / "val" / "dark" / "0.png")
    assert main(["predict", "--checkpoint", checkpoint, image, *flags]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1


def test_names_are_shown_as_they_are(
    checkpoint: str, image_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.chdir(image_folder)
    shutil.copy("val/dark/0.png", "[a] :cat:.png")
    Path("[b].png").touch()
    command = ["predict", "[a] :cat:.png", "[b].png", "--checkpoint", checkpoint]
    assert main([*command, "--skip-bad"]) == 0
    said = capsys.readouterr()
    assert "[a] :cat:.png" in said.out
    assert "[red]" in said.out
    assert "[b].png" in said.err
    assert main([*command, "--output", "[c].csv", "--skip-bad"]) == 0
    assert "[c].csv: 1 images" in capsys.readouterr().out


def test_a_worker_that_dies_is_told(
    checkpoint: str, image_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    """PyTorch raises an error wherever the main process is when the signal arrives."""
    before = multiprocessing.active_children()

    def killing(self: ClassPredictor, *_: object) -> list[Prediction]:
        for worker in multiprocessing.active_children():
            if worker not in before:
                os.kill(worker.pid, signal.SIGKILL)
                time.sleep(10)  # the signal ends it
        return []

    monkeypatch.setattr(ClassPredictor, "predictions", killing)
    command = ["predict", str(image_folder / "val"), "--checkpoint", checkpoint]
    assert main([*command, "--batch-size", "1", "--num-workers", "1"]) == 4
    assert "error: a worker process died: DataLoader worker" in capsys.readouterr().err


def test_device_is_taken(checkpoint: str, image_folder: Path, capsys: Said) -> None:
    image = str(image_folder / "val" / "dark" / "0.png")
    assert main(["predict", image, "--checkpoint", checkpoint, "--device", "cpu"]) == 0
    assert _expected(checkpoint, image)[0][0] in capsys.readouterr().out


def test_pictures_are_written_beside_each_other_and_not_over_others(
    checkpoint: str, image_folder: Path, tmp_path: Path, capsys: Said
) -> None:
    folder = tmp_path / "new" / "pictures"
    command = ["predict", str(image_folder / "val"), "--checkpoint", checkpoint]
    command += ["--pictures", str(folder)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "8 pictures" in said
    assert "┃" not in said  # pictures in place of tables
    for each in ("dark", "light"):  # the given folder's own
        assert sorted(path.name for path in (folder / each).iterdir()) == [
            f"{number}.png" for number in range(4)
        ]
        with Image.open(folder / each / "1.png") as picture:
            assert picture.width > 24  # a legend beside it
            shown = picture.convert("RGB").crop((0, 0, 24, 24))
        source = image_folder / "val" / each / "1.png"
        assert shown.tobytes() == open_image(source).tobytes()
    files = [str(image_folder / "val" / each / "0.png") for each in ("dark", "light")]
    assert main(["predict", *files, *command[2:]]) == 0  # two files of one name
    assert sorted(path.name for path in folder.glob("*.png")) == ["0-2.png", "0.png"]
    # Neither a path with .. nor a link leads out of the folder, or over a file that is read.
    around = [str(image_folder), str(image_folder / "val" / ".." / "train")]
    beside = ["--checkpoint", checkpoint, "--pictures", str(tmp_path / "beside")]
    assert main(["predict", *around, *beside]) == 0
    assert len(list((tmp_path / "beside").rglob("*.png"))) == 24 + 16
    assert len(list(image_folder.rglob("*.png"))) == 24
    over = ["--pictures", str(image_folder / "val"), "--overwrite"]
    assert main([*command[:4], *over]) == 2
    assert "would replace one of the files" in capsys.readouterr().err
    mine = folder / "dark" / "0.png"
    mine.write_bytes(b"mine")
    capsys.readouterr()
    assert main(command) == 2
    assert "0.png already exists" in capsys.readouterr().err
    assert mine.read_bytes() == b"mine"
    assert main([*command, "--overwrite"]) == 0
    assert main([*command[:-1], checkpoint]) == 2
    assert "is no folder" in capsys.readouterr().err
