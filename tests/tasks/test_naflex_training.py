"""Training at images' own proportions: sequences of at most so many patches."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from interrupted_runs import train_until
from tolerances import assert_close
from vision_ttt.cli.main import main
from vision_ttt.data import stack_sequences
from vision_ttt.engine import ConfigError, train
from vision_ttt.errors import UserError
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model
from vision_ttt.tasks.images.backbones import checkpoint_backbone
from vision_ttt.tasks.images.models import carried_sequences
from vision_ttt.tasks.images.task import test_transform as transform_of

Fields = Callable[..., dict]
SHAPES = [(24, 24), (12, 48), (60, 20), (24, 16)]


@pytest.fixture
def shaped_folder(image_folder: Path) -> Path:
    """The folder with pictures of several shapes."""
    for number, path in enumerate(sorted(image_folder.rglob("*.png"))):
        height, width = SHAPES[number % len(SHAPES)]
        Image.open(path).resize((width, height)).save(path)
    return image_folder


def test_a_run_on_sequences_goes_on_where_it_was_killed_and_predicts(
    shaped_folder: Path, tiny_fields: Fields, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"naflex": 24, "random_erasing": 0.5, "repeated_augmentation": 2}
    options |= {"checkpoint_every": 1, "accumulation_steps": 2, "crop_fraction": 1.0}
    whole = train(resolve(tiny_fields(**options, output=str(tmp_path / "whole"))))
    config = resolve(tiny_fields(**options, output=str(tmp_path / "parts")))
    train_until(config, 5)  # in the second epoch, after its first update
    resumed = train(config, resume=True)
    assert torch.equal(whole.evaluation.probabilities, resumed.evaluation.probabilities)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])

    checkpoint = str(tmp_path / "parts" / "last.safetensors")
    assert main(["eval", checkpoint, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == resumed.evaluation.accuracy
    folder, output = str(shaped_folder / "val"), tmp_path / "answers.json"
    command = ["predict", folder, "--checkpoint", checkpoint, "--output", str(output)]
    assert main([*command, "--batch_size", "3"]) == 0
    model, metadata = load_model(checkpoint)
    transform = transform_of(metadata.carried["input"], carried_sequences(metadata.carried))
    for each in json.loads(output.read_text())["predictions"]:
        image = transform(Image.open(each["image"]).convert("RGB"))
        height, width = (image["patch_coord"].amax(0) + 1).tolist()
        shape = Image.open(each["image"]).size
        assert height * width <= 24
        assert abs(np.log(width / height) - np.log(shape[0] / shape[1])) < 0.5
        with torch.no_grad():
            alone = model.eval()(stack_sequences([image])).softmax(-1)
        assert each["top"][0]["probability"] == pytest.approx(alone.max().item(), abs=1e-5)


def test_an_explained_classifier_sees_the_picture_that_it_classifies(
    shaped_folder: Path, tiny_fields: Fields
) -> None:
    weights = train(resolve(tiny_fields(naflex=24, epochs=1))).run_dir / "last.safetensors"
    model, metadata = load_model(str(weights))
    cut = transform_of(metadata.carried["input"], carried_sequences(metadata.carried))
    backbone = checkpoint_backbone(model, metadata, shorter_side=None)
    picture = Image.effect_noise((90, 30), 60).convert("RGB")
    image = backbone.prepare(picture)
    assert image.shape[2] > 2 * image.shape[1]
    with torch.no_grad():
        wanted = model(stack_sequences([cut(picture)]))
        assert_close(backbone.model(image[None]), wanted, 1e-5)


def test_export_says_that_it_states_another_preprocessing(
    shaped_folder: Path, tiny_fields: Fields, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for naflex, told in ((16, 1), (None, 0)):
        fields = tiny_fields(naflex=naflex, epochs=1, output=str(tmp_path / str(naflex)))
        weights = train(resolve(fields)).run_dir / "last.safetensors"
        caplog.clear()
        assert main(["export", str(weights), str(tmp_path / f"{naflex} exported")]) == 0
        assert caplog.text.count("images at their own proportions") == told


def test_images_that_do_not_decode_leave_a_batch(shaped_folder: Path, tiny_fields: Fields) -> None:
    for path in sorted(shaped_folder.glob("train/*/*.png"))[:13]:
        path.write_bytes(b"no picture")
    result = train(resolve(tiny_fields(naflex=16, epochs=1, skip_bad=True)))
    assert result.metrics["history"][-1]["train_loss"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"naflex": 0}, "naflex"),
        ({"naflex": 16, "mixup": 0.8}, "mixup is 0.8 and cutmix 0.0; both must be 0 with naflex"),
        (
            {"naflex": 16, "task": "diffusion"},
            "naflex is 16; it must be null, as the task diffusion",
        ),
        ({"naflex": 16, "task": "masked-images"}, "as the task masked-images takes images of"),
        ({"naflex": 16, "compile": True}, "compile is true; it must be false with naflex"),
        ({"naflex": 16, "crop_fraction": 0.9}, "crop_fraction is 0.9; it must be null or 1 with"),
        ({"naflex": 16, "arguments": {"patch_drop_rate": 0.5}}, "patch_drop_rate is 0.5; it must"),
        ({"naflex": 16, "arguments": {"dynamic_img_size": False}}, "dynamic_img_size is false; it"),
        ({"naflex": 16, "model": "resnet18", "arguments": {}}, "dynamic_img_size"),
        ({"naflex": 16, "model": "hvit3_tiny", "arguments": {}}, "HViT3 takes no images of any"),
        (
            {"naflex": 16, "model": "vim_nano_patch4_32", "arguments": {"depth": 1, "stride": 2}},
            "naflex is given, but Vim takes no images of any proportions",
        ),
    ],
)
def test_what_does_not_go_with_sequences(tiny_fields: Fields, fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(resolve(tiny_fields(**fields)))


def test_damaged_sequences_of_a_checkpoint() -> None:
    large = {"tokens": 65_536, "patch": [64, 64]}
    zeros = {"tokens": 0, "patch": [4, 4]}, {"tokens": 9, "patch": [4, 0]}
    for given in ({}, [9], large, *zeros):
        with pytest.raises(UserError, match="the checkpoint's sequences are damaged"):
            carried_sequences({"sequences": given})
