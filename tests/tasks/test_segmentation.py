"""The task of segmentation through the engine and the command: runs, resuming, faults, pictures."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from interrupted_runs import train_until
from vision_ttt import recipes
from vision_ttt.cli.main import main
from vision_ttt.data import DatasetError, ImageError
from vision_ttt.data.mask_folders import IGNORED, MaskError
from vision_ttt.engine import ConfigError, TrainConfig, train
from vision_ttt.engine.checkpoint import read_weights, save_weights
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import read_state
from vision_ttt.engine.task import Moment
from vision_ttt.tasks import load_model
from vision_ttt.tasks.segmentation.task import Segmentation

sys.path.insert(0, str(Path(__file__).parent))
from segmentation_scenes import CLASSES, write_scenes

SIDE = 32
MOMENT = Moment(0.0, None)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that no test changes."""
    return write_scenes(tmp_path_factory.mktemp("scenes"))


def _config(root: Path, output: Path, **changes: Any) -> TrainConfig:
    fields = {
        "task": "segmentation",
        "maps": "stages",
        "parts": {"channels": 8, "auxiliary_channels": 8},
        "model": "hvit3_tiny",
        "arguments": {
            "dims": [16, 16, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 1, 1, 1],
        },
        "root": str(root),
        "crop_size": SIDE,
        "shorter_side": 40,
        "longer_side": 80,
        "test_shorter_side": 40,
        "window": SIDE,
        "stride": 20,
        "epochs": 2,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "output": str(output),
        **changes,
    }
    return recipes.resolve(fields)


@pytest.fixture(scope="module")
def trained(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A run of two epochs."""
    return train(_config(scenes, tmp_path_factory.mktemp("trained") / "run", drop_path=0.1))


def _loss(task: Segmentation, model: nn.Module, items: list[Any]) -> tuple[Tensor, int]:
    return task.loss(model, task.collate(items), MOMENT)


class _PerPixel(nn.Module):
    """Logits of single pixels: what a batch holds beside them changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 1, 1))

    def forward(self, images: Tensor, auxiliary: bool = False) -> tuple[Tensor, Tensor]:
        assert len(images) >= 2  # as the real heads' batch norms need
        return F.conv2d(images, self.weight), F.conv2d(images, 2 * self.weight)


def test_a_linear_vit_sees_colours_as_its_base_does(scenes: Path, tmp_path: Path) -> None:
    arguments = {"base": "vit_tiny_patch16_224", "depth": 1, "embed_dim": 32, "num_heads": 1}
    linear = {"model": "linear_vit", "arguments": arguments, "maps": "tokens", "parts": {}}
    config = _config(scenes, tmp_path / "run", **linear)
    task = config.task.open(config)
    task.prepare(task.build_model(config.model.name, task.model_arguments()))
    assert task.statistics == {"mean": (0.5,) * 3, "std": (0.5,) * 3}


def test_the_loss_is_a_mean_over_all_pixels_in_any_parts(scenes: Path, tmp_path: Path) -> None:
    config = _config(scenes, tmp_path, scale_min=0.7, scale_max=0.7, auxiliary_weight=0.3)
    task = config.task.open(config)
    task.prepare(task.build_model(config.model.name, task.model_arguments()))
    items = task.train_set.__getitems__(range(4))
    assert any((item.labels == IGNORED).any() for item in items)
    model = _PerPixel()
    whole, count = _loss(task, model, items)
    assert count == 4
    images = torch.stack([item.image for item in items])
    labels = torch.stack([item.labels for item in items]).long()
    main, auxiliary = (
        F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none").mean()
        for logits in model(images)
    )
    torch.testing.assert_close(whole / count, main + 0.3 * auxiliary)
    parts = [_loss(task, model, items[:1]), _loss(task, model, items[1:])]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    assert sum(count for _, count in parts) == 4
    loss, count = _loss(task, model, [MaskError("a.png", "is none")])
    assert count == 0
    loss.backward()
    assert not model.weight.grad.any()


def test_a_run_that_is_interrupted_goes_on_as_if_it_had_not_been(
    trained: Any, scenes: Path, tmp_path: Path
) -> None:
    config = _config(scenes, tmp_path / "run", drop_path=0.1, checkpoint_every=1)
    train_until(config, 3)
    resumed = train(config, resume=True)
    one, other = (read_state(checkpoints(result.run_dir)[0]) for result in (trained, resumed))
    for part in ("model", "moments"):
        tensors, others = getattr(one, part), getattr(other, part)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    kept = ("test_miou", "test_loss", "train_loss", "learning_rate")
    for row, another in zip(trained.metrics["history"], resumed.metrics["history"], strict=True):
        assert {name: row[name] for name in kept} == {name: another[name] for name in kept}


def test_a_checkpoint_says_what_its_use_needs(trained: Any) -> None:
    model, metadata = load_model(trained.run_dir / "best.safetensors", task="segmentation")
    assert metadata.carried["classes"] == list(CLASSES)
    assert len(metadata.carried["palette"]) == 3
    told = metadata.carried["input"]
    assert (told["evaluation"], told["window"], told["test_shorter_side"]) == ("whole", SIDE, 40)
    assert len(told["mean"]) == len(told["std"]) == 3
    assert model(torch.zeros(1, 3, 40, 44)).shape == (1, 3, 40, 44)


def test_eval_repeats_the_runs_figures_and_sees_windows_if_asked_to(
    trained: Any, scenes: Path, capsys: pytest.CaptureFixture
) -> None:
    file = str(trained.run_dir / "last.safetensors")
    assert main(["eval", file, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["miou"] == pytest.approx(trained.metrics["test_miou"], abs=1e-4)
    assert whole["loss"] == pytest.approx(trained.metrics["test_loss"], rel=1e-4)
    assert [row["class"] for row in whole["classes"]] == list(CLASSES)
    assert (whole["images"], whole["evaluation"]) == (5, "whole")
    arguments = ["--evaluation", "slide", "--split", "all", "--dataset", str(scenes)]
    assert main(["eval", file, *arguments]) == 0
    told = capsys.readouterr().out
    assert "images, seen in windows of 32, stride 20" in told
    assert "13" in told


def test_masks_without_a_class_are_told_once(
    scenes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Masks of 0 and 255, read with 0 as the first class: all else is no class."""
    data = shutil.copytree(scenes, tmp_path / "data")
    for path in data.rglob("annotations/*/*.png"):
        Image.fromarray((np.array(Image.open(path)) > 1).astype(np.uint8) * 255).save(path)
    train(_config(data, tmp_path / "run", zero_is_unlabelled=False))
    told = [each.message for each in caplog.records if "have no pixel of" in each.message]
    assert len(told) == 1
    assert "have no pixel of red thing, blue thing; " in told[0]
    assert "the first class is 0, and 255 stands for no class" in told[0]


def test_eval_refuses_data_of_other_classes(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = write_scenes(tmp_path / "other", train=1, test=1)
    (other / "classes.txt").write_text("ground\nred thing\nyellow thing\n")
    file = str(trained.run_dir / "last.safetensors")
    assert main(["eval", file, "--dataset", str(other)]) == 2
    assert "they differ in blue thing, yellow thing" in capsys.readouterr().err


def test_eval_on_other_data_reads_the_part_that_is_asked_for(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = write_scenes(tmp_path / "other", train=1, test=2)
    shutil.rmtree(other / "images" / "training")
    file = str(trained.run_dir / "last.safetensors")
    assert main(["eval", file, "--dataset", str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 2
    assert main(["eval", file, "--dataset", str(other), "--split", "train"]) == 2
    assert "images/training" in capsys.readouterr().err
    weights, metadata = read_weights(file)
    data = {**metadata.data, "test_masks": str(other / "annotations" / "validation")}
    absolute = tmp_path / "absolute.safetensors"
    save_weights(absolute, weights, dataclasses.replace(metadata, data=data))
    assert main(["eval", str(absolute), "--dataset", str(other)]) == 2
    assert "test_masks is the absolute path" in capsys.readouterr().err


def test_predictions_are_segments_masks_and_pictures(
    trained: Any, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(2):
        Image.open(scenes / f"images/validation/{number}.jpg").save(images / f"{number}.png")
    (images / "broken.jpg").write_bytes(b"no image")
    output, pictures, masks = (tmp_path / name for name in ("o.json", "pictures", "masks"))
    file = str(trained.run_dir / "last.safetensors")
    command = ["predict", str(images), "--checkpoint", file, "--output", str(output)]
    assert main([*command, "--pictures", str(pictures), "--masks", str(masks)]) == 2
    assert "broken.jpg" in capsys.readouterr().err
    command += ["--skip-bad", "--pictures", str(pictures), "--masks", str(masks), "--overwrite"]
    assert main(command) == 0
    answer = json.loads(output.read_text())
    assert answer["skipped"] == [str(images / "broken.jpg")]
    model, metadata = load_model(file, task=None)
    for number, prediction in enumerate(answer["predictions"]):
        mask = Image.open(masks / f"{number}.png")
        labels = np.asarray(mask)
        assert mask.mode == "P"
        assert list(labels.shape) == prediction["size"]
        assert sum(each["share"] for each in prediction["segments"]) == pytest.approx(1)
        for each in prediction["segments"]:
            place = CLASSES.index(each["class"])
            assert (labels == place).mean() == pytest.approx(each["share"])
            assert (
                mask.getpalette()[3 * place : 3 * place + 3] == metadata.carried["palette"][place]
            )
        drawn = Image.open(pictures / f"{number}.png")
        assert drawn.width > labels.shape[1]
        task = trained.task
        with torch.inference_mode():
            image = task.test_set.transform.image(Image.open(images / f"{number}.png"))
            expected = model(image[None])[0]
        expected = F.interpolate(expected[None], labels.shape, mode="bilinear")[0].argmax(dim=0)
        assert (expected.numpy() == labels).mean() > 0.99
    table = tmp_path / "o.csv"
    assert (
        main(["predict", str(images / "0.png"), "--checkpoint", file, "--output", str(table)]) == 0
    )
    assert table.read_text().splitlines()[0] == "image,class,share"
    capsys.readouterr()
    assert main([*command[:2], "--checkpoint", file, "--skip-bad", "--topk", "1", "--json"]) == 0
    largest = json.loads(capsys.readouterr().out)["predictions"]
    assert [each["segments"] for each in largest] == [
        each["segments"][:1] for each in answer["predictions"]
    ]
    assert main([*command, "--masks", str(pictures)]) == 2
    assert "they must differ" in capsys.readouterr().err


def test_batch_norms_are_synchronised_outside_the_backbone(trained: Any) -> None:
    model, _ = load_model(trained.run_dir / "last.safetensors", task=None)
    image = torch.randn(1, 3, 40, 48)
    before, names = model(image), list(model.state_dict())
    model.synchronise_batch_norms()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    backbone = set(model.maps.backbone.modules())
    assert norms
    assert all(norm in backbone for norm in norms)
    synchronised = {name for name, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)}
    assert {name.partition(".")[0] for name in synchronised} == {"head", "auxiliary_head"}
    assert list(model.state_dict()) == names
    assert torch.equal(model(image), before)


def test_a_classifier_has_neither_windows_nor_masks(
    tiny_fields: Callable[..., dict], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    result = train(recipes.resolve(tiny_fields(epochs=1, warmup=0)))
    file = str(result.run_dir / "last.safetensors")
    assert main(["eval", file, "--evaluation", "slide"]) == 2
    assert "--evaluation is slide, but the checkpoint holds a classifier" in capsys.readouterr().err
    images = str(tmp_path / "images" / "val")
    assert main(["predict", images, "--checkpoint", file, "--masks", str(tmp_path / "m")]) == 2
    assert "--masks is given, but the checkpoint holds a classifier" in capsys.readouterr().err


def test_a_model_that_predicts_nan_is_named(
    trained: Any, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    weights, metadata = read_weights(trained.run_dir / "last.safetensors")
    weights["head.classifier.bias"].fill_(torch.nan)
    save_weights(tmp_path / "nan.safetensors", weights, metadata)
    image = str(scenes / "images/validation/0.jpg")
    assert main(["predict", image, "--checkpoint", str(tmp_path / "nan.safetensors")]) == 2
    assert "the model predicts NaN for" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nan.safetensors")]) == 1
    told = capsys.readouterr().err
    assert "the model's loss is nan" in told
    assert "NaN or infinity first appears in parameter 'head.classifier.bias'" in told


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicated", "sharded"])
def test_what_two_processes_evaluate_one_does_with_their_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture, sharding: str
) -> None:
    scenes = write_scenes(tmp_path / "scenes")
    # One process has fewer images than the other: sharded, both must make as many passes.
    Image.new("L", (7, 7)).save(scenes / "annotations/validation/1.png")
    # Each process has batch statistics of its own, of which the checkpoint holds one's.
    options = {"sharding": sharding, "ema_decay": 0.5, "skip_bad": True}
    config = _config(scenes, tmp_path / "run", **options)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(config.as_dict()))
    driver = Path(__file__).parents[1] / "engine" / "killed_run.py"
    process = subprocess.run(
        [sys.executable, str(driver), "2", str(recipe), "[]"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    command = ["eval", str(tmp_path / "run" / "last.safetensors"), "--json", "--skip-bad"]
    assert main(command) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["images"] == 4
    for name in ("miou", "loss", "pixel_accuracy"):
        assert metrics[f"test_{name}"] == pytest.approx(alone[name], rel=1e-5)


@pytest.mark.slow
def test_a_report_shows_curves_classes_and_test_images(trained: Any) -> None:
    report = trained.task.report(trained)
    assert [section.heading for section in report.sections] == [
        "Training",
        "Intersection over union by class",
        "Test images",
    ]
    assert "test mean IoU" in report.measured
    weights = str(trained.run_dir / "best.safetensors")
    assert report.next_command[:4] == ("predict", "FILES", "--checkpoint", weights)
    assert Path(weights).is_file()
    rows = report.files["IoU by class"].read_text().splitlines()
    assert rows[0] == "class,pixels,iou,accuracy"
    assert len(rows) == 4
    sheet = Image.open(trained.run_dir / "overlays.png")
    assert sheet.width > 3 * 300
    assert sheet.height > 5 * 250


def test_damaged_items_stop_a_run_or_are_counted(tmp_path: Path) -> None:
    root = write_scenes(tmp_path / "scenes")
    train_masks, test_masks = root / "annotations/training", root / "annotations/validation"
    Image.new("L", (40, 40), 9).save(train_masks / "0.png")
    Image.new("L", (7, 7), 1).save(test_masks / "1.png")
    (root / "images/training/3.jpg").write_bytes(b"")
    with pytest.raises((MaskError, ImageError), match=r"label 9; the 3 classes are 1 to 3|3\.jpg"):
        train(_config(root, tmp_path / "run"))
    config = _config(root, tmp_path / "run", skip_bad=True, batch_size=2, epochs=1)
    result = train(config, overwrite=True)
    names = [Path(name).relative_to(root).as_posix() for name in result.metrics["damaged_items"]]
    assert sorted(names) == [
        "annotations/training/0.png",
        "annotations/validation/1.png",
        "images/training/3.jpg",
    ]
    assert result.evaluation.images == 4


def test_data_that_cannot_be_used_are_refused_before_training(scenes: Path, tmp_path: Path) -> None:
    def refuse(error: type[Exception], told: str, **changes: Any) -> None:
        with pytest.raises(error, match=told):
            train(_config(changes.pop("root", scenes), tmp_path / "run", **changes))

    refuse(FileNotFoundError, "root of the dataset", root=tmp_path / "none")
    refuse(FileNotFoundError, "images/train", train_images="images/train")
    refuse(FileNotFoundError, "names.txt", classes="names.txt")
    refuse(DatasetError, "classes.txt", root=tmp_path)
    refuse(DatasetError, "have no mask", train_masks="annotations/validation")
    refuse(ConfigError, "at least 2, as the heads", batch_size=1)
    sharded = {"evaluation": "slide", "sharding": "sharded"}
    refuse(ConfigError, "it must be 'whole', or sharding 'replicated'", **sharded)
    refuse(ConfigError, "scale_min is 3.0; it must be at most scale_max", scale_min=3.0)
    refuse(ConfigError, "stride is 40; it must be at most window", stride=40)
    refuse(ConfigError, "crop_size is 8; it must be from 32", crop_size=8)
    refuse(ConfigError, "may not hold num_classes", arguments={"num_classes": 4})
    refuse(ValueError, "unknown model 'hvit3_tin'", model="hvit3_tin")
