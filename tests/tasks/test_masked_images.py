"""Pre-training on masked images: masks, the error, the run, and what starts from its weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from interrupted_runs import run_through, train_until
from vision_ttt.cli.main import main
from vision_ttt.engine import ConfigError, NonFiniteError, train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import read_state
from vision_ttt.engine.task import Moment
from vision_ttt.models import create_model
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model
from vision_ttt.tasks.masked_images.model import (
    MaskedImageModel,
    from_patches,
    random_mask,
    standardised,
    to_patches,
)

Fields = Callable[..., dict]


@pytest.fixture
def fields(tiny_fields: Fields) -> Fields:
    def make(**overrides: object) -> dict:
        common = {"task": "masked-images", "image_size": 16, "drop_path": 0.0}
        return tiny_fields(**{**common, **overrides})

    return make


@pytest.mark.parametrize(
    ("grid", "ratio", "side", "masked"),
    [((8, 8), 0.6, 2, 40), ((7, 5), 0.5, 1, 18), ((4, 4), 0.99, 2, 12), ((2, 4), 0.01, 2, 4)],
)
def test_masks_are_squares_that_cover_the_ratio(
    grid: tuple[int, int], ratio: float, side: int, masked: int
) -> None:
    generators = [np.random.default_rng(seed) for seed in range(8)]
    masks = torch.stack([random_mask(grid, ratio, side, generator) for generator in generators])
    assert (masks.sum(1) == masked).all()
    assert len(masks.unique(dim=0)) > 1
    cells = masks.view(8, grid[0] // side, side, grid[1] // side, side)
    assert (cells == cells[:, :, :1, :, :1]).all()


def test_squares_are_cut_at_the_border() -> None:
    generator = np.random.default_rng(0)
    counts = {int(random_mask((3, 5), 0.5, 2, generator).sum()) for _ in range(20)}
    assert counts <= set(range(5, 12))
    assert len(counts) > 1
    with pytest.raises(ValueError, match="mask_size is 8; the grid of 3 × 5 patches must hold"):
        random_mask((3, 5), 0.5, 8, generator)


def test_patches_are_the_tokens_pixels() -> None:
    images = torch.randn(2, 3, 8, 12)
    patches = to_patches(images, (4, 3))
    assert torch.equal(patches[1, 5], images[1, :, 4:, 3:6].flatten())  # the second row's second
    assert torch.equal(from_patches(patches, (4, 3), (2, 4)), images)
    even, mean, deviation = standardised(patches)
    assert even.mean(-1).abs().max() < 1e-6
    torch.testing.assert_close(even.square().mean(-1), torch.ones(2, 8))
    torch.testing.assert_close(even * deviation + mean, patches)
    with pytest.raises(ValueError, match="8 × 12 pixels are not whole patches of 4 × 5"):
        to_patches(images, (4, 5))


def test_the_loss_is_of_the_masked_patches_alone(fields: Fields) -> None:
    config = resolve(fields())
    task = config.task.open(config)
    model = task.build_model(config.model.name, task.model_arguments())
    task.prepare(model)
    images = torch.randn(3, 3, 16, 16)
    batch = task.augment({"images": images, "indices": torch.tensor([4, 0, 4])})
    masks = batch["masks"]
    assert torch.equal(masks[0], masks[2])  # of the image, and of nothing before it
    assert not torch.equal(masks[0], masks[1])
    loss, count = task.loss(model, batch, Moment(0.0, None))
    assert count == 3
    predicted = model(images, masks)
    targets, _, _ = standardised(to_patches(images, (4, 4)))
    each = [(p - t)[m].abs().mean() for p, t, m in zip(predicted, targets, masks, strict=True)]
    torch.testing.assert_close(loss, sum(each))
    task.train_set.epoch = 1
    assert not torch.equal(task.augment(batch)["masks"], masks)
    empty = {"images": images[:0], "indices": torch.empty(0, dtype=torch.int64)}
    loss, count = task.loss(model, task.augment(empty), Moment(0.0, None))
    assert (loss.item(), count) == (0.0, 0)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_it_learns_tells_and_starts_a_classifier(
    fields: Fields, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(resolve(fields(epochs=3, learning_rate=1e-2)).as_dict()))
    assert main(["train", str(recipe)]) == 0
    run_dir = tmp_path / "run"
    page = (run_dir / "report.html").read_text()
    assert "Reconstructions" in page
    assert (run_dir / "reconstructions.png").is_file()
    metrics = json.loads((run_dir / "metrics.json").read_text())
    losses = [row["test_loss"] for row in metrics["history"]]
    assert losses[-1] < losses[0]
    capsys.readouterr()
    weights = run_dir / "last.safetensors"
    assert main(["eval", str(weights), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["loss"] == pytest.approx(losses[-1])
    assert main(["predict", "--checkpoint", str(weights), str(run_dir / "curves.png")]) == 2
    assert "a backbone trained on masked images" in capsys.readouterr().err

    start = {"initial_weights": str(weights), "frozen_layers": "all", "epochs": 1}
    classifier = {"task": "classification", "image_size": 32, "output": str(tmp_path / "next")}
    result = train(resolve(fields(**start, **classifier)))
    own = load_model(weights, task="masked-images")[0].backbone.state_dict()
    for name, value in result.model.state_dict().items():
        if name not in ("pos_embed", "head.weight", "head.bias"):
            assert torch.equal(value, own[name]), name
    config = resolve(fields())
    task = config.task.open(config)
    again = task.build_model(config.model.name, task.model_arguments())
    token = again.backbone.mask_token
    task.start_from(weights, again, config.model.name, {})
    assert again.backbone.mask_token is token
    assert torch.equal(again.backbone.norm.weight, own["norm.weight"])


def test_killed_and_resumed_it_is_the_same_run(fields: Fields, tmp_path: Path) -> None:
    whole = train(resolve(fields(ema_decay=0.9, output=str(tmp_path / "whole"))))
    config = resolve(fields(ema_decay=0.9, output=str(tmp_path / "parts"), checkpoint_every=3))
    train_until(config, 4)
    resumed = train(config, resume=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])
    assert whole.evaluation == resumed.evaluation


def test_two_processes_train_what_one_does(fields: Fields, tmp_path: Path) -> None:
    options = {"epochs": 1, "learning_rate": 5e-4}
    one = train(resolve(fields(**options, output=str(tmp_path / "one"))))
    run_through([(fields(**options, output=str(tmp_path / "two")), [])], tmp_path, processes=2)
    (state,) = checkpoints(tmp_path / "two")
    for name, weight in read_state(state).model.items():
        assert (one.model.state_dict()[name] - weight).abs().max() <= 1e-6, name


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"mask_size": 4}, "mask_size is 4; the grid of 4 × 4 patches"),
        ({"model": "resnet18", "arguments": {}}, "resnet18: ResNet is not a plain backbone"),
        (
            {"model": "vim_nano_patch4_32", "arguments": {"depth": 1, "stride": 2}},
            "its patches overlap",
        ),
        ({"arguments": {"patch_drop_rate": 0.5}}, "patch_drop_rate is 0.5; it must be 0, as every"),
        ({"frozen_layers": 1}, "frozen_layers: MaskedImageModel does not name its layers"),
        ({"layer_decay": 0.5}, "layer_decay: MaskedImageModel does not name its layers"),
        ({"arguments": {"num_classes": 3}}, "model.arguments may not hold num_classes"),
    ],
)
def test_what_does_not_fit_leaves_no_run_directory(
    fields: Fields, overrides: dict, told: str
) -> None:
    config = resolve(fields(**overrides))
    with pytest.raises(ConfigError, match=told):
        train(config)
    assert not Path(config.run.output).exists()


@pytest.mark.parametrize("ratio", [0.0, 1.0, math.nan])
def test_ratios_out_of_range(fields: Fields, ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"mask_ratio is .*; it must be above 0 and below 1"):
        resolve(fields(mask_ratio=ratio))


def test_nan_names_its_place(fields: Fields, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.nn.Linear.forward
    monkeypatch.setattr(
        torch.nn.Linear,
        "forward",
        lambda self, x: original(self, x) * (math.nan if self.out_features == 48 else 1),
    )
    with pytest.raises(NonFiniteError, match=r"the output of module 'decoder' is not finite"):
        train(resolve(fields(composite_ops=False)))


@pytest.mark.parametrize(
    "name", ["vim_nano_patch4_32", "mambar_nano_patch4_32", "vit3_nano_patch4_32"]
)
def test_what_a_backbone_has_behind_its_norm_is_frozen(name: str) -> None:
    """Under DDP every parameter that learns must have a gradient."""
    options = {"mambar": {"head_reduction": 2}, "vit3": {"num_heads": 2}}.get(
        name.split("_")[0], {}
    )
    model = MaskedImageModel(create_model(name, num_classes=0, depth=1, embed_dim=32, **options))
    model(torch.randn(1, 3, 32, 32), torch.ones(1, 64, dtype=torch.bool)).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert all(name.startswith("backbone.neck.") for name in frozen)
