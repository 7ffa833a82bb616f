"""Hostile command lines: each ends with 2 and one line on stderr, and writes nothing."""

import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from described_models import describe_classifier
from vision_ttt.cli.main import main
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import save_weights
from vision_ttt.tasks.images.models import data_config

Said = pytest.CaptureFixture[str]
HUGE = "9" * 25
NO_NUMBER = "9" * 5000
NOT_UTF8 = os.fsdecode(b"caf\xe9.png")
PREDICT = ["predict", "--checkpoint", "c.safetensors"]
CONVERT = ["convert", "c.safetensors", "o.safetensors", "--model"]
VIT3 = [*CONVERT, "vit3_tiny_patch16_224"]
NANO = ["bench", "models", "--models", "vittt_nano_patch4_32", "--resolutions", "32"]


@pytest.fixture(autouse=True)
def never_hangs() -> Iterator[None]:
    """A test that waits for ever fails."""

    def fail(*_: object) -> None:
        raise AssertionError("it hangs")

    former = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c.safetensors, a.png and the worst that can lie beside them; no test may change it."""
    folder = tmp_path_factory.mktemp("hostile")
    torch.manual_seed(0)
    arguments = {"num_classes": 2, "depth": 1, "embed_dim": 32, "num_heads": 1, "img_size": 16}
    model = build_model("vittt_nano_patch4_32", arguments)
    described = data_config(model, 16)
    metadata = describe_classifier("vittt_nano_patch4_32", arguments, ("dark", "light"), described)
    save_weights(folder / "c.safetensors", model.state_dict(), metadata)
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(folder / "a.png")
    Image.new("RGB", (1, 5000)).save(folder / "long.png")
    for name in ("dark", "light"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(5):
            shutil.copy(folder / "a.png", folder / "images" / name / f"{number}.png")
    (folder / "eps.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    (folder / "other.csv").write_text("a,b\n1,2\n")
    (folder / "binary.csv").write_bytes(b"\xff\xfe\x00")
    (folder / "no-rows.csv").write_bytes(b"")
    (folder / "empty").mkdir()
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "pipe.png")
    os.mkfifo(folder / "pipe.yaml")
    (folder / "half.yaml").write_text('run: {output: "\\ud800"}\n')
    for name in ("dark", NOT_UTF8):
        (folder / "not-utf8" / name).mkdir(parents=True)
    (folder / "circle").symlink_to("circle")
    return folder


def _content(folder: Path) -> dict[str, float]:
    return {str(path): path.lstat().st_mtime for path in folder.rglob("*")}


CASES = [
    # Names that are none, and files that are not what they should be.
    (["eval", ""], "the checkpoint is empty"),
    (["eval", "absent"], "No such file: absent"),
    (["eval", "vittt_nano_patch4_32.digit"], "nearest: vittt_nano_patch4_32.digits"),
    (["eval", "pipe"], "the checkpoint pipe is a named pipe"),
    (["eval", "empty"], "the checkpoint empty is a folder; accepted: a file of weights, or"),
    (["eval", "circle"], "Too many levels of symbolic links: circle"),
    (["eval", "c.safetensors/x"], "Not a directory: c.safetensors/x"),
    (["eval", "x" * 5000], "File name too long"),
    (["eval", "no-rows.csv"], "truncated, corrupt or no safetensors file"),
    (["eval", "a\0b"], "a null character"),
    (["eval", "\ud800"], r"the argument '\ud800' holds half a character"),
    (["letters", "a\udc80\ud800"], "holds half a character (a surrogate), which no name has"),
    (["train", "half.yaml"], r"recipe half.yaml has '\ud800', which holds half a character"),
    (["train", "pipe.yaml"], "recipe pipe.yaml cannot be read: it is a named pipe, not a file"),
    (["eval", "c.safetensors", "--dataset", "not-utf8"], "name that is no text in UTF-8; rename"),
    (["eval", "c.safetensors", "--dataset", ""], "--dataset is empty"),
    (
        ["eval", "c.safetensors", "--dataset", "/proc/self"],
        "--dataset /proc/self is in /proc or /sys",
    ),
    (["eval", "c.safetensors", "--dataset", "pipe"], "No such dataset"),
    (["eval", "c.safetensors", "--dataset", "empty"], "has no class folders"),
    ([*PREDICT, ""], "the file is empty"),
    ([*PREDICT, "pipe"], "image pipe: it is a named pipe, not a file"),
    ([*PREDICT, "pipe.png", "--num-workers", "1"], "image pipe.png: it is a named pipe"),
    ([*PREDICT, "empty"], "no image in the folder"),
    ([*PREDICT, "/proc"], "the file /proc is in /proc or /sys"),
    ([*PREDICT, "/proc/kmsg"], "is in /proc or /sys"),
    ([*PREDICT, "/dev/zero"], "it is a device"),
    ([*PREDICT, "eps.png"], "cannot decode image eps.png: not an image of PNG, JPEG"),
    ([*PREDICT, NOT_UTF8], "No such file"),
    (
        ["explain", "norms", "c.safetensors", "long.png", "--shorter-side=224", "--output", "o"],
        "error: long: a picture of 1 × 5000 pixels (width × height) would be resized to 224 ×",
    ),
    (["predict", "a.png", "--checkpoint", "other.csv"], "other.csv is truncated, corrupt"),
    ([*VIT3[:1], "other.csv", *VIT3[2:]], "other.csv is truncated or no file of torch.save"),
    ([*VIT3[:1], "pipe", *VIT3[2:]], "the input pipe is a named pipe"),
    (["export", "pipe", "o.pt2"], "the checkpoint pipe is a named pipe"),
    (["sample", "--checkpoint", "pipe"], "the checkpoint pipe is a named pipe"),
    # What cannot be written, or already exists.
    ([*PREDICT, "a.png", "--output", ""], "the output is empty"),
    ([*PREDICT, "a.png", "--output", "other.csv"], "already exists; name another file, or give"),
    ([*PREDICT, "a.png", "--output", "/dev/full"], "must be a .csv or .json file"),
    ([*PREDICT, "a.png", "--output", "absent/o.csv"], "the folder absent does not exist"),
    ([*VIT3[:2], "c.safetensors", *VIT3[3:]], "c.safetensors already exists"),
    (["export", "c.safetensors", "empty"], "empty already exists"),
    (["export", "c.safetensors", "pipe", "--overwrite"], "the output pipe is a named pipe"),
    (["export", "c.safetensors", "/dev/full", "--overwrite"], "/dev/full is a device"),
    (["export", "c.safetensors", "."], "the output '.' must be"),
    (["sample", "--checkpoint", "c.safetensors", "--output", "pipe.png"], "is a named pipe"),
    (["sample", "--checkpoint", "c.safetensors", "--images", "a.png/x"], "a.png is no folder"),
    ([*NANO, "--output", "/dev/full"], "--output /dev/full is a device"),
    ([*NANO, "--output", "empty"], "--output empty is a folder"),
    ([*NANO, "--output", "other.csv"], "other.csv is no file of measurements"),
    ([*NANO, "--output", "a.png/o.csv"], "a.png is no folder"),
    (["demo", "--output", "a.png"], "File exists: a.png"),
    # Numbers out of range, and ones that nobody means.
    ([*PREDICT, "a.png", "--batch-size", HUGE], f"--batch-size is {HUGE}; it must be at least 1"),
    ([*PREDICT, "a.png", "--topk", NO_NUMBER], "--topk is too long; it must be a whole number"),
    ([*PREDICT, "a.png", "--num-workers", HUGE], "at most 256"),
    ([*PREDICT, "a.png", "--device", "hpu"], "device 'hpu' cannot be used"),
    ([*PREDICT, "a.png", "--device", ""], "accepted here: cpu"),
    (["eval", "c.safetensors", "--num-workers", "-1"], "--num-workers is -1"),
    (["export", "c.safetensors", "o.pt2", "--batch-size", "-1"], "--batch-size is -1"),
    (["export", "c.safetensors", "o.pt2", "--batch-size", "1.5"], "a whole number or null"),
    (["sample", "--checkpoint", "c.safetensors", "--per-class", HUGE], "at most 10,000"),
    (["sample", "--checkpoint", "c.safetensors", "--guidance", "nan"], "it must be a number"),
    ([*VIT3, "--arguments.depth", "1000000"], "--arguments.depth is 1000000; it must be at most"),
    ([*VIT3, "--arguments.depth", "-1"], "cannot be built"),
    ([*VIT3, "--arguments.embed_dim", "49920"], "the weights are not those of this ViT3"),
    (
        [*CONVERT, "hvit3_tiny", "--arguments.depths", "[9999999,1,1,1]"],
        "it must be at most 1,000",
    ),
    (["bench", "ops", "--threads", "0"], "--threads is 0; it must be at least 1"),
    (["bench", "ops", "--repeats", HUGE], "at most 10,000"),
    (["bench", "ops", "--shape", "1", HUGE, "1", "1"], "at most 2,147,483,648 are measured"),
    (["bench", "ops", "--shape", "1", "64", "1", "99999"], "w1 would have"),
    (["bench", "ops", "--mini-batch-size", HUGE], "at most 2,147,483,648 are measured"),
    (["bench", "train", "--batch-size", "65536", "--resolutions", "512"], "a batch has"),
    (
        ["bench", "models", "--resolutions", "99999"],
        "--resolutions is 99999; it must be",
    ),
    (["bench", "models", "--models", "dit3_nano_patch4_32"], "dit3_nano_patch4_32"),
    (["bench", "models", "--models", "a\nb"], "unknown model"),
    (["bench", "models", "--device", "tpu"], "--device is 'tpu'; it must be one of cpu, cuda"),
    (["models", "[!"], "no model matches"),
    (["train", "digits", "--arguments.depth", "{a: " * 3000 + "1" + "}" * 3000], "too deeply"),
]


@pytest.mark.parametrize(
    ("argv", "told"),
    CASES,
    ids=lambda each: " ".join(each)[:60] if isinstance(each, list) else "",
)
def test_hostile_arguments_are_one_line(
    folder: Path, argv: list[str], told: str, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = _content(folder)
    assert main(argv) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert not said.out
    assert _content(folder) == before


@pytest.mark.parametrize(
    "argv",
    [
        ["export", "c.safetensors", "OUT"],
        ["export", "c.safetensors", "OUT.pt2"],
        [*PREDICT, *["a.png"] * 400, "--output", "OUT.json"],
    ],
    ids=["folder", "program", "predictions"],
)
def test_a_disk_that_takes_no_more_is_one_line_and_leaves_nothing(
    folder: Path,
    tmp_path: Path,
    argv: list[str],
    capsys: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    argv = [word.replace("OUT", str(tmp_path / "out")) for word in argv]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # ulimit -f
    try:
        assert main(argv) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = capsys.readouterr().err
    assert told.startswith("error: File too large")
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_told_before_the_work(
    folder: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    for argv in ([*PREDICT, "a.png", "--output", "o.csv"], [*NANO, "--output", "new/o.csv"]):
        assert main(argv) == 2
        assert "cannot be written to" in capsys.readouterr().err


def test_files_that_are_no_images_can_be_skipped(
    folder: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main([*PREDICT, "pipe", "eps.png", "a.png", "--skip-bad", "--json"]) == 0
    assert "2 of 3 images skipped" in capsys.readouterr().err


def test_others_loaders_start_no_program(
    folder: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Datasets of torchvision's open their images by Pillow themselves."""
    started = tmp_path / "started"
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    shutil.copytree(folder / "images", tmp_path / "images")
    Image.new("RGB", (9, 9)).save(tmp_path / "images" / "dark" / "0.png", "EPS")
    dataset = ["--dataset", "torch/image_folder", "--dataset-root", str(tmp_path / "images")]
    assert main(["eval", str(folder / "c.safetensors"), *dataset]) == 2
    told = capsys.readouterr().err
    assert "cannot decode image 0 of torch/image_folder" in told
    assert "; --skip-bad leaves out what cannot be read" in told
    assert not started.exists()


def test_a_file_that_disappears_is_named(
    folder: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone.png"
    shutil.copy(folder / "a.png", gone)
    monkeypatch.chdir(folder)
    load_model = torch.nn.Module.eval  # called when the arguments have been checked

    def remove_then_load(model: torch.nn.Module) -> torch.nn.Module:
        gone.unlink(missing_ok=True)
        return load_model(model)

    monkeypatch.setattr(torch.nn.Module, "eval", remove_then_load)
    assert main([*PREDICT, str(gone)]) == 2
    assert f"cannot decode image {gone}: there is no such file" in capsys.readouterr().err


def test_names_that_are_no_text_are_told_and_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(folder / "a.png", NOT_UTF8)
    command = ["predict", NOT_UTF8, "--checkpoint", str(folder / "c.safetensors")]
    for flags in ([], ["--json"], ["--output", "o.csv"], ["--output", "o.json"]):
        assert main([*command, *flags]) == 0
    assert b"\ncaf\xe9.png," in Path("o.csv").read_bytes()
    (prediction,) = json.loads(Path("o.json").read_text())["predictions"]
    assert prediction["image"] == NOT_UTF8


def test_output_is_replaced_only_when_told(
    folder: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "o.csv"
    monkeypatch.chdir(folder)
    command = [*PREDICT, "a.png", "--output", str(output)]
    assert main(command) == 0
    first = output.read_text()
    output.write_text("mine")
    assert main(command) == 2
    assert "give --overwrite" in capsys.readouterr().err
    assert output.read_text() == "mine"
    assert main([*command, "--overwrite"]) == 0
    assert output.read_text() == first
