"""`vision-ttt sample`, and what `train` leaves of a diffusion model."""

import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from vision_ttt.cli.main import main
from vision_ttt.engine import ModelMetadata
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import save_weights
from vision_ttt.recipes import resolve
from vision_ttt.tasks.diffusion.pictures import grid
from vision_ttt.tasks.images.models import data_config

Said = pytest.CaptureFixture[str]
SMALL = {"hidden_size": 32, "depth": 1, "num_heads": 2}
CLASSES = ("cat", "dog", "7", "un émeu/nandou")


def _checkpoint(
    path: Path,
    weight: float | None = None,
    names: Sequence[str] = CLASSES,
    noise_steps: int = 100,
    **options: object,
) -> str:
    torch.manual_seed(0)
    arguments = {"num_classes": 4, "in_chans": 3, "img_size": 8, **SMALL, **options}
    model = build_model("dit3_nano_patch4_32", arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if weight is not None:
            model.head.linear.weight.fill_(weight)
    described = {"objective": "noise", "schedule": "linear", "steps": noise_steps}
    carried = {"classes": list(names), "input": data_config(model), "process": described}
    metadata = ModelMetadata({"name": "diffusion"}, "dit3_nano_patch4_32", arguments, carried)
    save_weights(path, model.state_dict(), metadata)
    return str(path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return _checkpoint(tmp_path / "last.safetensors")


@pytest.fixture
def sampled(tmp_path: Path, checkpoint: str, capsys: Said):
    """Run the command with few steps into a file of a name; return its path."""

    def run(name: str, *flags: str) -> Path:
        output = tmp_path / name
        command = ["sample", "--checkpoint", checkpoint, "--output", str(output), "--steps", "3"]
        assert main([*command, *flags]) == 0, capsys.readouterr().err
        return output

    return run


def test_a_picture_has_a_row_for_each_class(sampled, capsys: Said) -> None:
    picture = Image.open(sampled("a.png", "--per-class", "3"))
    assert picture.height == 4 * 50 + 2
    assert picture.mode == "RGB"
    labels = np.asarray(picture)[:, : picture.width - (3 * 50 + 2)]  # at the left of the images
    wanted = grid(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), 1, CLASSES).permute(1, 2, 0).numpy()
    assert (labels == wanted[:, : labels.shape[1]]).all()
    said = capsys.readouterr().out
    assert "12 samples of dit3_nano_patch4_32, 3 of each class: cat, dog, 7, un émeu/nandou" in said


def test_the_same_command_makes_the_same_numbers(sampled) -> None:
    flags = ("--per-class", "2", "--guidance", "2")
    first, second = (load_file(sampled(f"{n}.safetensors", *flags)) for n in range(2))
    assert first["samples"].shape == (8, 3, 8, 8)
    assert first["labels"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert torch.equal(first["samples"], second["samples"])
    for change in (["--seed", "1"], ["--sampler", "ddpm"], ["--steps", "5"], ["--guidance", "1"]):
        name = f"{change[0][2:]}.safetensors"
        other = load_file(sampled(name, "--per-class", "2", "--guidance", "2", *change))
        assert not torch.allclose(other["samples"], first["samples"], atol=1e-3), change


@pytest.mark.parametrize(
    ("given", "labels"),
    [("dog", [1]), ("1-3", [1, 2, 3]), ("7,0", [2, 0]), ("un émeu/nandou, cat", [3, 0])],
)
def test_classes_by_name_number_and_range(sampled, given: str, labels: list[int]) -> None:
    output = sampled("a.safetensors", "--classes", given, "--per-class", "1")
    assert load_file(output)["labels"].tolist() == labels


def test_images_one_by_one_are_those_of_the_picture(sampled, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    picture = sampled("a.png", "--per-class", "2", "--images", str(folder))
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    assert names == [
        *("7/00004.png", "7/00005.png", "cat/00000.png", "cat/00001.png"),
        *("dog/00002.png", "dog/00003.png", "un émeu_nandou/00006.png", "un émeu_nandou/00007.png"),
    ]
    second_dog = np.asarray(Image.open(folder / "dog" / "00003.png"))
    assert second_dog.shape == (8, 8, 3)
    shown = np.asarray(Image.open(picture))[2 + 50 : 50 + 50, -50:-2]
    assert (shown[::6, ::6] == second_dog).all()


def test_a_class_that_is_no_name_of_a_folder(sampled, tmp_path: Path, capsys: Said) -> None:
    sampled("a.png", "--per-class", "1", "--images", str(tmp_path / "images"))
    told = "'un émeu/nandou' cannot name a folder; its images are in un émeu_nandou"
    assert told in capsys.readouterr().out


def test_two_classes_of_one_folder(tmp_path: Path, capsys: Said) -> None:
    names = ("a/b", "a_b", "c:d", "c_d")
    path = _checkpoint(tmp_path / "last.safetensors", names=names)
    command = ["sample", "--checkpoint", path, "--steps", "2", "--output", str(tmp_path / "a.png")]
    assert main([*command, "--images", str(tmp_path / "images")]) == 2
    assert "one folder 'a_b' for a/b, a_b; choose one of them" in capsys.readouterr().err
    assert not (tmp_path / "images").exists()
    if os.name == "posix":
        chosen = ["--classes", "c:d,c_d", "--per-class", "1", "--images", str(tmp_path / "images")]
        assert main([*command, *chosen]) == 0
        assert {path.name for path in (tmp_path / "images").iterdir()} == {"c:d", "c_d"}


def test_the_default_steps_are_no_more_than_the_process_has(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / "last.safetensors", noise_steps=7)
    output = tmp_path / "samples.safetensors"
    assert main(["sample", "--checkpoint", path, "--classes", "0", "--output", str(output)]) == 0
    with safe_open(output, "pt") as file:
        assert '"steps": 7' in str(file.metadata())


def test_latents_are_numbers(tmp_path: Path, capsys: Said) -> None:
    latents = _checkpoint(tmp_path / "latents.safetensors", in_chans=4)
    command = ["sample", "--checkpoint", latents, "--steps", "2", "--per-class", "1"]
    assert main([*command, "--output", str(tmp_path / "a.png")]) == 2
    assert "makes latents of 4 channels" in capsys.readouterr().err
    assert main([*command, "--output", str(tmp_path / "a.safetensors")]) == 0
    samples = load_file(tmp_path / "a.safetensors")["samples"]
    assert samples.shape == (4, 4, 8, 8)
    assert samples.abs().max() > 1.5  # not clipped to pixels


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--classes", "cta"], "there is no class 'cta'; nearest: cat"),
        (["--classes", "2-4"], "classes 2-4: numbers go from 0 to 3"),
        (["--classes", "3-1"], "classes 3-1: numbers go from 0 to 3"),
        (["--classes", ""], "there is no class ''"),
        (["--per-class", "0"], "--per-class is 0; it must be at least 1"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--steps", "101"], "steps is 101; accepted: 1 to 100"),
        (["--guidance", "-1"], "--guidance is -1.0; it must be at least 0"),
        (["--seed", "-1"], "--seed is -1; it must be at least 0"),
        (["--sampler", "euler"], "sampler is 'euler'; accepted: ddim, ddpm"),
        (["--output", "a.jpg"], "a.jpg must be a .png or .safetensors file"),
        (["--output", "absent/a.png"], "the folder absent does not exist"),
        (["--device", "tpu9"], "device 'tpu9' cannot be used"),
        (["--checkpoint", "absent.safetensors"], "absent.safetensors"),
        (["--per_clas", "1"], "unknown flag --per_clas; nearest: --per-class"),
    ],
    ids=str,
)
def test_mistakes_are_one_line_and_write_nothing(
    checkpoint: str, tmp_path: Path, flags: list[str], told: str, capsys: Said
) -> None:
    given = {"--checkpoint": checkpoint, "--output": str(tmp_path / "a.png")}
    given |= dict([flags])
    command = ["sample", *(word for pair in given.items() for word in pair)]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.png"))


def test_nothing_is_overwritten_by_accident(sampled, tmp_path: Path, capsys: Said) -> None:
    output = sampled("a.png", "--per-class", "1")
    command = ["sample", "--checkpoint", str(tmp_path / "last.safetensors"), "--per-class", "1"]
    command += ["--steps", "1", "--output"]
    assert main([*command, str(output)]) == 2
    assert "a.png already exists" in capsys.readouterr().err
    before = output.read_bytes()
    assert main([*command, str(output), "--overwrite"]) == 0
    assert output.read_bytes() != before
    assert main([*command, str(tmp_path / "b.png"), "--images", str(tmp_path)]) == 2
    assert "already exists and is not empty" in capsys.readouterr().err


def test_damaged_weights_and_missing_packages(
    tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = _checkpoint(tmp_path / "nan.safetensors", weight=float("nan"))
    command = ["sample", "--checkpoint", damaged, "--steps", "1", "--per-class", "1"]
    command += ["--output", str(tmp_path / "a.png")]
    assert main(command) == 2
    assert "makes NaN: its weights are damaged" in capsys.readouterr().err
    # As if it were not installed.
    needing = ("vision_ttt.diffusion", "vision_ttt.tasks.diffusion.task")
    for name in [name for name in sys.modules if name.startswith(needing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert main(command) == 2
    assert "pip install 'vision-ttt[diffusion]'" in capsys.readouterr().err
    short = ["--epochs", "1", "--warmup", "0", "--output", str(tmp_path / "run")]
    assert main(["train", "digits-diffusion", *short]) == 2
    assert "pip install 'vision-ttt[diffusion]'" in capsys.readouterr().err
    with pytest.raises(ImportError, match="diffusers"):
        importlib.import_module("vision_ttt.diffusion")


def test_train_leaves_samples_and_a_report(tmp_path: Path, image_folder: Path, capsys: Said):
    run = tmp_path / "run"
    recipe = tmp_path / "recipe.yaml"
    fields = {
        **{"task": "diffusion", "model": "dit3_nano_patch4_32", "arguments": SMALL},
        **{"dataset": str(image_folder)},
        **{"image_size": 8, "epochs": 1, "warmup": 0, "batch_size": 8, "output": str(run)},
    }
    recipe.write_text(json.dumps(resolve(fields).as_dict()))
    assert main(["train", str(recipe)]) == 0
    said = capsys.readouterr()
    assert "vision-ttt sample --checkpoint" in said.out
    assert re.search(r"epoch 1/1: train loss [\d.]+, test loss [\d.]+, \d+ images/s", said.err)
    picture = Image.open(run / "samples.png")
    assert picture.height == 2 * 50 + 2
    assert picture.width > 8 * 50 + 2 + 30  # labels at the left
    metrics = json.loads((run / "metrics.json").read_text())
    for dtype, error in (("float32", 1e-5), ("bfloat16", 0.02)):
        assert main(["eval", str(run / "last.safetensors"), "--json", "--dtype", dtype]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["loss"] == pytest.approx(metrics["test_loss"], rel=error)
        assert report["model"] == "dit3_nano_patch4_32"
        assert report["skipped"] == []
    assert main(["eval", str(run / "last.safetensors")]) == 0
    assert re.search(r"loss .*\d\.\d", capsys.readouterr().out)
    page = (run / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "A row for each of dark, light" in page


@pytest.mark.parametrize("name", ["a.PNG", "a.SafeTensors"])
def test_a_suffix_may_be_of_any_case(sampled, name: str) -> None:
    assert sampled(name).is_file()
