"""What a dense model starts from: a classifier, another task's model, one of its own task."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vision_ttt.dense import build_detector, build_segmenter
from vision_ttt.engine import ConfigError
from vision_ttt.engine.checkpoint import ModelMetadata, save_weights
from vision_ttt.tasks.dense.task import DenseTask

NANO = {"embed_dim": 48, "depth": 4, "num_heads": 3, "patch_size": 8, "img_size": 32}
PARTS = {"adapter": {"conv_width": 8, "heads": 3}, "channels": 16}
HEADS = {"box_features": 16, "mask_channels": [16]}
NAME = "vittt_nano_patch4_32"


def _segmenter(**changes: object) -> nn.Module:
    parts = {**PARTS, "auxiliary_channels": 16, **changes}
    return build_segmenter(NAME, num_classes=3, dense=parts, **NANO)


def _detector(num_classes: int = 2) -> nn.Module:
    return build_detector(NAME, num_classes=num_classes, dense={**PARTS, **HEADS}, **NANO)


def _saved(path: Path, model: nn.Module, task: str) -> Path:
    metadata = ModelMetadata({"name": task}, NAME, NANO, {})
    save_weights(path, model.state_dict(), metadata)
    return path


def _start(path: Path, model: nn.Module) -> str:
    task = SimpleNamespace(name="detection", partial_weights=False)
    owner = SimpleNamespace(config=SimpleNamespace(task=task))
    return DenseTask.start_from(owner, path, model, NAME, NANO)


def test_a_detector_takes_a_segmenters_backbone_and_adapter(tmp_path: Path) -> None:
    source, model = _segmenter(), _detector()
    heads = {key: x.clone() for key, x in model.state_dict().items() if key[:5] != "maps."}
    told = _start(_saved(tmp_path / "w.safetensors", source, "segmentation"), model)
    taken = source.maps.state_dict()
    assert f"{len(taken)} tensors taken, 2 of the file left out (auxiliary_head, head)" in told
    for key, x in model.state_dict().items():
        assert torch.equal(x, heads[key] if key in heads else taken[key[len("maps.") :]])


def test_a_detector_of_other_classes_keeps_their_layers(tmp_path: Path) -> None:
    source, model = _detector(num_classes=5), _detector()
    told = _start(_saved(tmp_path / "w.safetensors", source, "detection"), model)
    assert "of the model left at random (heads.box_predictor" in told
    own, others = model.state_dict(), source.state_dict()
    differing = {key for key in own if own[key].shape != others[key].shape}
    assert differing
    assert all(torch.equal(own[key], others[key]) for key in own if key not in differing)


def test_an_adapter_of_another_size_is_refused(tmp_path: Path) -> None:
    source = _segmenter(adapter={"conv_width": 16, "heads": 3})
    path = _saved(tmp_path / "w.safetensors", source, "segmentation")
    with pytest.raises(ConfigError, match=r"of another shape prior\.proj.*the file holds weights"):
        _start(path, _detector())


BASE = "deit_tiny_patch16_224"
VIT = {"embed_dim": 48, "depth": 4, "num_heads": 3, "patch_size": 8, "img_size": 32}


def _on_vit(name: str, classes: int, **arguments: object) -> nn.Module:
    return build_detector(name, num_classes=classes, dense={**PARTS, **HEADS}, **VIT, **arguments)


@pytest.mark.parametrize("task", ["detection", "segmentation", "classification"])
def test_a_linear_vit_takes_what_a_vit_has(tmp_path: Path, task: str) -> None:
    """Of a model of its own task also the heads, of another dense one the maps' backbone."""
    source, model = _on_vit(BASE, 2), _on_vit("linear_vit", 2, base=BASE)
    inner = model.maps.backbone.blocks[0].attn.inner.w1.clone()
    vit = source.maps.backbone
    saved = vit if task == "classification" else source
    told = _start(_saved(tmp_path / "w.safetensors", saved, task), model)
    assert "of the model left at random (" in told
    assert "blocks.0.attn.inner.w1" in told
    own = model.maps.backbone
    assert torch.equal(own.blocks[1].attn.qkv.weight, vit.blocks[1].attn.qkv.weight)
    assert torch.equal(own.blocks[0].attn.inner.w1, inner)
    heads = [(key, x) for key, x in source.state_dict().items() if key.startswith("heads.")]
    assert heads
    is_same = all(torch.equal(model.state_dict()[key], x) for key, x in heads)
    assert is_same == (task == "detection")


def test_a_linear_vit_takes_its_own_whole(tmp_path: Path) -> None:
    source, model = (_on_vit("linear_vit", 2, base=BASE) for _ in range(2))
    told = _start(_saved(tmp_path / "w.safetensors", source, "detection"), model)
    assert "at random" not in told
    for key, x in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], x)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"embed_dim": 96}, r"of another shape .*blocks\.0\.attn\.qkv"),
        ({"depth": 8}, r"unexpected .*blocks\.4\."),
        ({"init_values": 1e-3}, r"unexpected .*ls1\.gamma"),
    ],
)
def test_a_linear_vit_refuses_another_vit(tmp_path: Path, others: dict, told: str) -> None:
    source = build_detector(BASE, num_classes=2, dense={**PARTS, **HEADS}, **{**VIT, **others})
    path = _saved(tmp_path / "w.safetensors", source, "detection")
    model = _on_vit("linear_vit", 2, base=BASE)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    with pytest.raises(ConfigError, match=f"does not fit the backbone LinearViT: .*{told}"):
        _start(path, model)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


def test_a_refused_head_leaves_the_backbone_as_it_was(tmp_path: Path) -> None:
    parts = {**PARTS, "adapter": {"conv_width": 16, "heads": 3}, **HEADS}
    source = build_detector(BASE, num_classes=2, dense=parts, **VIT)
    path = _saved(tmp_path / "w.safetensors", source, "detection")
    model = _on_vit("linear_vit", 2, base=BASE)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"of another shape prior\.proj|of another shape maps"):
        _start(path, model)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


def test_positions_of_another_size_are_told(tmp_path: Path) -> None:
    source = build_detector(
        BASE, num_classes=2, dense={**PARTS, **HEADS}, **{**VIT, "img_size": 64}
    )
    path = _saved(tmp_path / "w.safetensors", source, "detection")
    told = _start(path, _on_vit("linear_vit", 2, base=BASE))
    assert "1 of them interpolated (pos_embed)" in told
    assert "1 of the file left out (cls_token)" in told
