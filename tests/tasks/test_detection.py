"""A detector's whole run at a tiny size: training, stopping, evaluation, prediction, damage."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import faster_coco_eval.core.mask as rle_masks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from coco_files import CATEGORIES, rectangle, write_set
from interrupted_runs import run_through, train_until
from vision_ttt import recipes
from vision_ttt.cli.main import main
from vision_ttt.data import DatasetError, ImageError, make_loader
from vision_ttt.data.coco import CocoImages
from vision_ttt.data.coco_reading import read_coco
from vision_ttt.engine import TrainConfig, train
from vision_ttt.engine.checkpoint import read_weights, save_weights
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.parallel import make_accelerator
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import read_state
from vision_ttt.engine.task import Moment
from vision_ttt.engine.train import TrainResult
from vision_ttt.errors import UserError
from vision_ttt.tasks import load_model
from vision_ttt.tasks.detection.config import DetectionSection
from vision_ttt.tasks.detection.pictures import DrawnObject, drawn, drawn_with_legend
from vision_ttt.tasks.detection.predict import ObjectPredictor
from vision_ttt.tasks.detection.report import overlay_sheet, precision_curves
from vision_ttt.tasks.detection.task import Detection
from vision_ttt.tasks.images.pictures import palette

PARTS = {
    "channels": 8,
    "box_features": 16,
    "mask_channels": [8],
    "anchor_sizes": [8, 16, 32, 64, 128],
    "sampled_regions": 16,
    "proposals": 20,
    "score_threshold": 0.0,
    "detections": 5,
    "adapter": {"conv_width": 8, "heads": 2, "points": 2},
}
TINY = {"depth": 4, "embed_dim": 32, "num_heads": 1, "patch_size": 16}


def _config(root: Path, output: Path, **changes: Any) -> TrainConfig:
    fields = {
        "task": "detection",
        "parts": PARTS,
        "root": str(root),
        "shorter_side": 48,
        "shorter_side_least": 32,
        "longer_side": 64,
        "crop": True,
        "model": "vittt_nano_patch4_32",
        "arguments": TINY,
        "drop_path": 0.1,
        "updates": 4,
        "evaluate_every": 2,
        "checkpoint_every": 1,
        "batch_size": 2,
        "learning_rate": 1e-3,
        "output": str(output),
    }
    return recipes.resolve({**fields, **changes})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 6 training and 4 test images."""
    return write_set(tmp_path_factory.mktemp("coco"), train=6, test=4)


@pytest.fixture(scope="module")
def result(root: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A run of 4 updates; as short as it is, what it finds is nearly random."""
    return train(_config(root, tmp_path_factory.mktemp("runs") / "run"))


def test_stopped_and_resumed_it_is_the_same_run(
    root: Path, result: TrainResult, tmp_path: Path
) -> None:
    config = _config(root, tmp_path / "run")
    train_until(config, 3)
    resumed = train(config, resume=True)
    one, other = (read_state(checkpoints(run.run_dir)[0]) for run in (result, resumed))
    for part in ("model", "moments"):
        tensors, others = getattr(one, part), getattr(other, part)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items()), part
    for row, same in zip(result.metrics["history"], resumed.metrics["history"], strict=True):
        kept = [name for name in row if name.startswith("test_")] + ["train_loss", "update"]
        assert {name: row[name] for name in kept} == {name: same[name] for name in kept}


def test_metrics_and_checkpoint_say_what_it_was_trained_on(root: Path, result: TrainResult) -> None:
    metrics = result.metrics
    told = read_coco(root / "annotations" / "instances_train2017.json").counts
    assert metrics["train_objects"] == told.objects > 0
    assert metrics["train_crowd_regions"] == metrics["test_crowd_regions"] == 1
    assert metrics["train_empty_images"] == 1
    assert len(result.task.train_set) == 5
    assert len(result.task.test_set) == metrics["test_images"] == 4
    for name in ("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75"):
        assert 0 <= metrics[f"test_{name}"] <= 1
    model, metadata = load_model(result.run_dir / "best.safetensors", task="detection")
    assert metadata.carried == {
        "classes": ["square", "disc"],
        "category_ids": [3, 7],
        "input": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
        "shorter_side": 48,
        "longer_side": 64,
        "ids_in_names": True,
    }
    assert model.num_classes == 2


def test_a_linear_vit_sees_colours_as_its_base_does(root: Path, tmp_path: Path) -> None:
    arguments = {**TINY, "base": "vit_tiny_patch16_224"}
    config = _config(root, tmp_path / "run", model="linear_vit", arguments=arguments)
    task = config.task.open(config)
    task.prepare(task.build_model(config.model.name, task.model_arguments()))
    assert task.input == {"mean": (0.5,) * 3, "std": (0.5,) * 3}


def test_the_loss_is_the_detectors_times_the_images(root: Path, tmp_path: Path) -> None:
    config = _config(root, tmp_path / "run")
    task = config.task.open(config)
    model = task.build_model(config.model.name, task.model_arguments())
    task.prepare(model)
    items = task.train_set.__getitems__([0, 1, 2])
    torch.manual_seed(0)
    loss, count = task.loss(model, task.collate(items), Moment(0.0, None))
    torch.manual_seed(0)
    mean = torch.tensor(task.input["mean"])[:, None, None]
    std = torch.tensor(task.input["std"])[:, None, None]
    images = [(item.image / 255 - mean) / std for item in items]
    losses = model(images, [item.target for item in items])
    assert count == 3
    torch.testing.assert_close(loss, 3 * sum(losses.values()))
    # Without an image the graph is that of all others, for processes that wait for its gradients.
    loss, count = task.loss(model, task.collate([]), Moment(0.0, None))
    assert (loss.item(), count) == (0.0, 0)
    loss.backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert not any(name.startswith(("maps", "pyramid", "proposals")) for name in without)


class _Oracle(nn.Module):
    """Finds what is there: it knows each image by its pixels."""

    def __init__(self, task: Detection) -> None:
        super().__init__()
        self.task = task
        images: CocoImages = task.test_set.items
        self.known = [(task.test_set[n].image, images[n]) for n in range(len(images))]

    def forward(
        self, images: list[Tensor], *, sizes: list[tuple[int, int]], pasted: bool
    ) -> list[dict[str, Tensor]]:
        assert not pasted
        assert len(images) == 1
        (found,) = (
            item
            for image, item in self.known
            if image.shape == images[0].shape
            and torch.equal(self.task._normalised([image])[0], images[0])
        )
        masks = [
            rle_masks.decode(mask)[round(y0) : round(y1), round(x0) : round(x1)]
            for mask, (x0, y0, x1, y1) in zip(found.masks, found.boxes.tolist(), strict=True)
        ]
        grown = [F.interpolate(torch.from_numpy(m)[None, None].float(), (28, 28)) for m in masks]
        return [
            {
                "boxes": torch.from_numpy(found.boxes).float(),
                "labels": torch.from_numpy(found.labels),
                "scores": torch.linspace(0.9, 0.8, len(masks)),
                "masks": torch.cat([torch.zeros(0, 1, 28, 28), *grown]),
            }
        ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_who_finds_all_that_is_there_has_an_ap_of_one(result: TrainResult, batch_size: int) -> None:
    task = result.task
    loader = make_loader(task.test_set, batch_size, task.collate)
    damaged = DamagedItems(False)
    found = task.evaluate(
        _Oracle(task), loader, make_accelerator(), damaged=damaged, between=lambda: None
    )
    assert found.metrics["box_ap"] == pytest.approx(1.0)
    assert found.metrics["mask_ap50"] == pytest.approx(1.0)
    assert found.metrics["mask_ap"] > 0.8
    assert [place for place, _ in found.found] == [0, 1, 2, 3]
    # The pictures of the report, but for drawing them, which takes seconds.
    sheet = overlay_sheet(task, found, 3)
    assert sheet.width > 2 * 480
    assert len(precision_curves(found).axes) == 2
    figures = task.figures(found)
    json.dumps(figures)
    assert [row["class"] for row in figures["classes"]] == ["square", "disc"]
    assert len(task.table("x", figures).rows) == 6


def test_eval_is_that_of_the_run(result: TrainResult, capsys: pytest.CaptureFixture) -> None:
    checkpoint = str(result.run_dir / "last.safetensors")
    model, metadata = load_model(checkpoint, task="detection")
    machine = {"precision": "float32", "num_workers": 0}
    task = DetectionSection.reopen(metadata, {}, part="test", **machine)
    loader = make_loader(task.test_set, 3, task.collate)
    again = task.evaluate(
        model, loader, make_accelerator(), damaged=DamagedItems(False), between=lambda: None
    )
    for (_, one), (_, other) in zip(result.evaluation.found, again.found, strict=True):
        np.testing.assert_array_equal(one.boxes, other.boxes)
        assert one.masks == other.masks
    assert again.metrics == result.evaluation.metrics
    assert main(["eval", checkpoint, "--json", "--split", "train", "--batch_size", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["images"] == 6
    assert set(told) >= {"box_ap", "mask_ap", "classes", "skipped"}
    assert main(["eval", checkpoint]) == 0
    assert "square" in capsys.readouterr().out
    assert main(["eval", checkpoint, "--split", "all"]) == 2
    assert "one COCO file, of the part test or train, not 'all'" in capsys.readouterr().err


def test_eval_on_other_data_needs_the_same_categories(
    result: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoint = str(result.run_dir / "last.safetensors")
    other = write_set(tmp_path / "other", train=2, test=2)
    assert main(["eval", checkpoint, "--json", "--dataset", str(other)]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 2
    path = other / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    content["categories"] = [*CATEGORIES, {"id": 9, "name": "star"}]
    path.write_text(json.dumps(content))
    assert main(["eval", checkpoint, "--dataset", str(other)]) == 2
    told = capsys.readouterr().err
    assert "has 3 categories, the checkpoint 2; they differ in 9 (star)" in told
    assert main(["eval", checkpoint, "--dataset", str(tmp_path / "none")]) == 2
    assert main(["eval", checkpoint, "--dataset_root", str(other)]) == 2
    weights, metadata = read_weights(checkpoint)
    data = {**metadata.data, "test_images": str(other / "val2017")}
    checkpoint = str(tmp_path / "absolute.safetensors")
    save_weights(Path(checkpoint), weights, replace(metadata, data=data))
    assert main(["eval", checkpoint, "--dataset", str(other)]) == 2
    assert "test_images is the absolute path" in capsys.readouterr().err


def test_damaged_data_of_a_checkpoint_are_refused(result: TrainResult) -> None:
    _, metadata = read_weights(result.run_dir / "last.safetensors")
    machine = {"part": "test", "precision": "float32", "num_workers": 0}
    with pytest.raises(UserError, match="does not name its dataset; give --dataset"):
        DetectionSection.reopen(replace(metadata, data={}), {}, **machine)
    with pytest.raises(UserError, match=r"the checkpoint's data: .*unexpected.*colour"):
        DetectionSection.reopen(
            replace(metadata, data={**metadata.data, "colour": 1}), {}, **machine
        )


def test_predict_gives_cocos_results_rows_and_pictures(
    root: Path, result: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, checkpoint = root / "val2017", str(result.run_dir / "last.safetensors")
    other = tmp_path / "photo.png"
    Image.open(folder / "000000000001.png").resize((40, 90)).save(other)
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"\x89PNG")
    files = [str(folder), str(other), str(bad)]
    command = ["predict", *files, "--checkpoint", checkpoint, "--skip-bad", "--num_workers", "1"]
    pictures = tmp_path / "pictures"
    output = ["--output", str(tmp_path / "x.json"), "--pictures", str(pictures)]
    assert main([*command, *output]) == 0
    said = capsys.readouterr()
    assert f"skipped: cannot decode image {bad}" in said.err
    assert "5 pictures" in said.out
    entries = json.loads((tmp_path / "x.json").read_text())
    by_file: dict[str, list[Any]] = {}
    for entry in entries:
        by_file.setdefault(entry["file_name"], []).append(entry)
    assert set(by_file) == {*map(str, folder.iterdir()), str(other)}
    assert all("image_id" not in entry for entry in by_file[str(other)])
    for place, found in result.evaluation.found:
        own = by_file[str(folder / f"{place + 1:012d}.png")]
        assert {entry["image_id"] for entry in own} == {place + 1}
        # Through packed blocks, which round otherwise.
        boxes = np.array([entry["bbox"] for entry in own])
        boxes[:, 2:] += boxes[:, :2]
        np.testing.assert_allclose(boxes, found.boxes, atol=0.05)
        labels = [[3, 7].index(entry["category_id"]) + 1 for entry in own]
        assert labels == found.labels.tolist()
        assert all(entry["segmentation"]["size"] == [48, 64] for entry in own)
    for file in by_file:
        size = Image.open(file).size
        assert Image.open(pictures / f"{Path(file).stem}.png").size[1] >= size[1]
    # One file shows the rest: detectors take their time.
    command, entries = ["predict", str(other), "--checkpoint", checkpoint], by_file[str(other)]
    assert main([*command, "--output", str(tmp_path / "x.csv")]) == 0
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(entries)
    assert list(rows[0]) == list(ObjectPredictor.columns)
    assert [float(row["score"]) for row in rows] == [entry["score"] for entry in entries]
    capsys.readouterr()
    assert main([*command, "--topk", "1", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert best == entries[:1]
    assert main([*command, *output[2:]]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*command, *output[2:], "--overwrite"]) == 0
    capsys.readouterr()
    assert main(command) == 0
    assert "photo.png" in capsys.readouterr().out.replace("\n", "")


def test_damaged_weights_are_not_taken_for_empty_images(result: TrainResult, root: Path) -> None:
    options = {"topk": None, "batch_size": 1, "num_workers": 0}

    def damage_weight(model: nn.Module) -> None:
        model.get_parameter("heads.box_head.fc6.weight").data.fill_(torch.nan)

    def damage_block(model: nn.Module) -> None:  # as where weights are packed into integers
        model.maps.backbone.blocks[0].register_forward_hook(lambda *given: given[-1] * torch.nan)

    for damage, told in (
        (damage_weight, r"weight heads\.box_head\.fc6\.weight is NaN or infinite"),
        (damage_block, r"finds nothing: the maps .* are NaN or infinite"),
    ):
        model, metadata = load_model(result.run_dir / "last.safetensors", task="detection")
        damage(model)
        predictor = DetectionSection.predictor(
            model, metadata, device=torch.device("cpu"), precision="float32", **options
        )
        with pytest.raises(UserError, match=told):
            list(predictor.predict([root / "val2017" / "000000000001.png"]))


def test_pictures_show_mask_box_and_class() -> None:
    image = Image.new("RGB", (100, 80), "black")
    mask = np.zeros((80, 100), dtype=np.uint8, order="F")
    mask[30:60, 20:70] = 1
    colours = palette(2)
    objects = [DrawnObject(2, (20, 30, 70, 60), rle_masks.encode(mask), 0.87)]
    picture = drawn(image, objects, ("square", "disc"), colours)
    pixels = np.array(picture)
    assert picture.size == (100, 80)
    assert tuple(pixels[30, 60]) == colours[1]  # on the box
    inside = pixels[45, 45].astype(float)
    np.testing.assert_allclose(inside, 0.45 * np.array(colours[1]), atol=1)
    assert (pixels[70:] == 0).all()
    assert drawn(image, objects, ("square", "disc"), colours, longer_side=50).size == (50, 40)
    large = drawn(image, objects, ("square", "disc"), colours, longer_side=640)
    with_legend = drawn_with_legend(image, objects, ("square", "disc"), colours)
    assert with_legend.width > 640
    assert np.array_equal(np.array(with_legend)[:512, :640], np.array(large))
    assert drawn_with_legend(image, [], ("square", "disc"), colours).size == (640, 512)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A set with an image that does not decode, a missing one, and one of a wrong annotation."""
    root = write_set(tmp_path / "coco", train=7, test=4)
    (root / "train2017" / "000000000001.png").write_bytes(b"\x89PNG")
    (root / "train2017" / "000000000002.png").unlink()
    path = root / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    wrong = next(each for each in content["annotations"] if each["image_id"] == 3)
    wrong["segmentation"] = [rectangle(500, 500, 9, 9)]
    path.write_text(json.dumps(content))
    return root


def test_damaged_images_stop_the_run_or_are_counted(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"1 of the 7 images .* such as 000000000002\.png"):
        train(_config(damaged, tmp_path / "run"))
    fields = {"updates": None, "epochs": 2, "evaluate_every": 9}
    config = _config(damaged, tmp_path / "run", **fields, skip_bad=True)
    result = train(config)
    names = {Path(name).name for name in result.metrics["damaged_items"]}
    assert names == {f"00000000000{number}.png" for number in (1, 2, 3)}
    assert result.metrics["train_faulty_images"] == 1
    (damaged / "train2017" / "000000000002.png").write_bytes(b"\x89PNG")
    told = r"1 of the 7 images .*_train2017\.json have invalid annotations: .*: annotation \d+ of"
    with pytest.raises(DatasetError, match=told):
        train(_config(damaged, tmp_path / "other", **fields))
    path = damaged / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] != 3]
    path.write_text(json.dumps(content))
    with pytest.raises(ImageError, match=r"00000000000[12]\.png"):
        train(_config(damaged, tmp_path / "other", **fields))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c["categories"].pop(), "the categories of .* differ in 3 \\(square\\)"),
        (lambda c: c.update(annotations=[]), "has no object to train on"),
        (
            lambda c: c["images"][0].update(file_name="lost.png"),
            r"1 of the 4 images of .* missing in .*train2017, such as lost\.png; run\.skip_bad",
        ),
    ],
)
def test_what_is_wrong_with_a_file_stops_before_training(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    root = write_set(tmp_path / "coco", train=4, test=2)
    path = root / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    if "categories" in told:
        content["annotations"] = [a for a in content["annotations"] if a["category_id"] == 7]
        content["categories"].sort(key=lambda each: -each["id"])
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=told):
        train(_config(root, tmp_path / "run"))
    assert not list((tmp_path / "run").glob("**/*.safetensors"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"iscrowd": 1}, "has no object to test on: the images have none but crowd regions"),
        ({"bbox": [1, 1, 0, 0]}, "has no object to test on: the images have none but crowd"),
        ({"area": -1}, "no object to test on: the images that are there and not faulty have none"),
        ({"area": 2e10}, "no object to test on: the images that are there and not faulty have"),
    ],
)
def test_test_annotations_without_a_metric_stop_before_training(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    root = write_set(tmp_path / "coco", train=4, test=2)
    path = root / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    content["annotations"] = [{**each, **changes} for each in content["annotations"]]
    path.write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=told):
        train(_config(root, tmp_path / "run", skip_bad=True))
    assert not list((tmp_path / "run").glob("**/*.safetensors"))


def test_images_without_objects_can_be_kept(root: Path, tmp_path: Path) -> None:
    config = _config(root, tmp_path / "run", empty_images="keep")
    task = config.task.open(config)
    task.prepare(task.build_model(config.model.name, task.model_arguments()))
    assert len(task.train_set) == 6
    sample = task.train_set[4]
    assert len(sample.target["boxes"]) == 0


def test_help_lists_the_fields_of_detection(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["train", "coco-vittt-tiny", "--help"])
    told = capsys.readouterr().out
    for flag in ("--shorter-side-least", "--crop", "--maps", "--parts", "--decay-at"):
        assert flag in told
    assert "--mixup" not in told


@pytest.mark.slow
def test_two_processes_evaluate_each_image_once(tmp_path: Path) -> None:
    """Five images, of which one is damaged, do not go round evenly."""
    root = write_set(tmp_path / "coco", train=6, test=5)
    (root / "val2017" / "000000000003.png").write_bytes(b"\x89PNG")
    fields = _config(root, tmp_path / "run", skip_bad=True, evaluate_every=4).as_dict()
    ended, _ = run_through([(fields, [])], tmp_path, processes=2)
    assert ended == [0]
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert [Path(name).name for name in metrics["damaged_items"]] == ["000000000003.png"]
    model, metadata = load_model(tmp_path / "run" / "last.safetensors", task="detection")
    task = DetectionSection.reopen(metadata, {}, part="test", precision="float32", num_workers=0)
    loader = make_loader(task.test_set, 5, task.collate)
    alone = task.evaluate(
        model, loader, make_accelerator(), damaged=DamagedItems(True), between=lambda: None
    )
    assert [place for place, _ in alone.found] == [0, 1, 3, 4]
    own = {f"test_{name}": value for name, value in alone.metrics.items()}
    assert own == {
        name: value for name, value in metrics.items() if name.startswith("test_") and "ap" in name
    }
