"""Frozen layers stay as they are, bit for bit; the classifier always learns."""

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from vision_ttt.engine import ConfigError, train
from vision_ttt.engine.freezing import freeze_layers, training_mode
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model

Fields = Callable[..., dict]
SHAPE = {"depth": 3, "embed_dim": 32, "num_heads": 1}


@pytest.mark.parametrize(
    ("layers", "frozen"),
    [
        (0, ()),
        (1, ("patch_embed", "pos_embed")),
        (3, ("patch_embed", "pos_embed", "blocks.0", "blocks.1")),
        ("all", ("patch_embed", "pos_embed", "blocks", "norm")),
    ],
)
def test_what_is_frozen_is_left_bit_for_bit(
    tiny_fields: Fields, tmp_path: Path, layers: int | str, frozen: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    source = timm.create_model("vittt_nano_patch4_32", num_classes=2, **SHAPE)
    save_file(source.state_dict(), tmp_path / "start.safetensors")
    start = {name: weight.clone() for name, weight in source.state_dict().items()}
    fields = tiny_fields(
        arguments=SHAPE,
        epochs=1,
        frozen_layers=layers,
        layer_decay=0.8,
        initial_weights=str(tmp_path / "start.safetensors"),
        warmup=0,
    )
    tuned = train(resolve(fields))
    for name, weight in tuned.model.state_dict().items():
        assert torch.equal(weight, start[name]) == name.startswith(frozen or ("none",)), name
    loaded, _ = load_model(tuned.run_dir / "last.safetensors")
    assert torch.equal(loaded.head.weight, tuned.model.head.weight)


def test_frozen_parts_are_not_random_either() -> None:
    model = timm.create_model("vittt_nano_patch4_32", num_classes=2, drop_path_rate=0.5, **SHAPE)
    freeze_layers(model, "all")
    training_mode(model)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), model(images))
    assert model.training
    model = timm.create_model("resnet18", num_classes=2)
    freeze_layers(model, "all")
    training_mode(model)
    before = model.bn1.running_mean.clone()
    model(images)
    assert torch.equal(model.bn1.running_mean, before)
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == [
        "fc.weight",
        "fc.bias",
    ]


def test_both_heads_of_a_distilled_model_learn() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=2, depth=1)
    freeze_layers(model, "all")
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert learning == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]


def test_what_a_linear_model_has_inherited_is_frozen() -> None:
    model = timm.create_model("linear_vit", num_classes=2, depth=2, embed_dim=32, num_heads=1)
    freeze_layers(model, "inherited")
    learning = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert learning == {*model.new_parameters(), "head.weight", "head.bias"}
    with pytest.raises(ConfigError, match=r"Vittt has no new parameters; only linear_vit"):
        freeze_layers(timm.create_model("vittt_nano_patch4_32", **SHAPE), "inherited")


def test_more_layers_than_there_are() -> None:
    model = timm.create_model("vittt_nano_patch4_32", num_classes=2, **SHAPE)
    freeze_layers(model, 4)
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert learning == ["head.weight", "head.bias"]
    with pytest.raises(ConfigError, match=r"frozen_layers is 5, .* has 4 beside .* 0 to 4, or all"):
        freeze_layers(model, 5)


def test_a_model_without_classifier_or_layers() -> None:
    with pytest.raises(ConfigError, match="Vittt has no head to train"):
        freeze_layers(timm.create_model("vittt_nano_patch4_32", num_classes=0), 1)
    with pytest.raises(ConfigError, match="Linear does not name its layers and its head"):
        freeze_layers(torch.nn.Linear(2, 2), 1)
