"""Starting from weights: what is taken is said, and another model's weights are called so."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from described_models import describe_classifier
from vision_ttt.dense import build_segmenter
from vision_ttt.engine import ConfigError, train
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import save_weights
from vision_ttt.engine.initial_weights import start_from, weights_file
from vision_ttt.engine.state import SavedRun, TrainState, save_state
from vision_ttt.engine.tensor_files import write_tensors
from vision_ttt.recipes import change, resolve

NANO = "vittt_nano_patch4_32"
SMALL = {"depth": 1, "embed_dim": 32, "num_heads": 1}


def _weights(path: Path, **arguments: object) -> tuple[Path, nn.Module]:
    """A file of a small model's weights, of three classes on 16 × 16 pixels."""
    arguments = {"num_classes": 3, "img_size": 16, **SMALL, **arguments}
    model = build_model(NANO, arguments)
    metadata = describe_classifier(NANO, arguments, ("a", "b", "c"), {"input_size": (3, 16, 16)})
    save_weights(path, model.state_dict(), metadata)
    return path, model


def test_the_line_counts_what_is_taken_interpolated_and_left_out(tmp_path: Path) -> None:
    path, source = _weights(tmp_path / "w.safetensors")
    target = build_model(NANO, {**SMALL, "num_classes": 5})
    told = start_from(path, target, NANO, {**SMALL, "num_classes": 5})
    count = len(target.state_dict())
    assert told == (
        f"starting from {path}, weights of {NANO} with depth 1, embed_dim 32, num_heads 1:"
        f" {count - 2} tensors taken, 1 of them interpolated (pos_embed), 2 start at zero"
        " (head.weight, head.bias)."
    )
    assert not target.head.weight.any()
    assert torch.equal(target.norm.weight, source.norm.weight)
    same = build_model(NANO, {**SMALL, "num_classes": 3, "img_size": 16})
    assert start_from(path, same, NANO, SMALL).endswith(f": {count} tensors taken.")
    assert torch.equal(same.head.weight, source.head.weight)


def test_a_classifier_starts_from_a_segmenters_weights(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    dense = {"maps": "tokens"}
    source = build_segmenter(NANO, num_classes=3, dense=dense, img_size=16, **SMALL)
    write_tensors(path, source.state_dict(), "[]")
    target = build_model(NANO, {**SMALL, "num_classes": 5})
    told = start_from(path, target, NANO, SMALL)
    assert told.endswith(
        f" {len(target.state_dict()) - 2} tensors taken, 1 of them interpolated (pos_embed),"
        " 2 start at zero (head.weight, head.bias)."
    )
    assert torch.equal(target.norm.weight, source.maps.backbone.norm.weight)
    assert torch.equal(target.patch_embed.proj.weight, source.maps.backbone.patch_embed.proj.weight)
    assert not target.head.weight.any()


def test_weights_of_another_model_say_so(tmp_path: Path) -> None:
    path, _ = _weights(tmp_path / "w.safetensors", design="dual")
    arguments = {**SMALL, "num_classes": 3, "img_size": 16}
    with pytest.raises(
        ConfigError, match=r"missing \S+conv2d.*; the file holds weights of .* dual"
    ):
        start_from(path, build_model(NANO, arguments), NANO, arguments)
    # All shapes are the same, the model is not.
    other = {**SMALL, "design": "dual", "global_pool": "max_norm"}
    told = start_from(path, build_model(NANO, {**arguments, **other}), NANO, other)
    assert "weights of vittt_nano_patch4_32 with depth 1, embed_dim 32, num_heads 1, design" in told
    assert told.endswith(
        "Note: the model trained is vittt_nano_patch4_32 with depth 1, embed_dim 32, num_heads 1,"
        " design dual, global_pool max_norm."
    )


def test_files_of_others_and_of_other_kinds(tmp_path: Path) -> None:
    model = build_model(NANO, {**SMALL, "num_classes": 3})
    path = tmp_path / "w.safetensors"
    write_tensors(path, model.state_dict(), "[]")
    assert "which does not say whose weights it holds: 2" in start_from(path, model, NANO, SMALL)
    write_tensors(path, {"other": torch.zeros(2)}, json.dumps({"model": 3}))
    with pytest.raises(ConfigError, match="the file does not say whose they are"):
        start_from(path, model, NANO, SMALL)
    state = TrainState(config={"model": {"name": NANO}})
    save_state(path, SavedRun(state, model.state_dict(), {}, {}))
    with pytest.raises(ConfigError, match=f"holds the state of a run of {NANO}, to be resumed"):
        start_from(path, model, NANO, SMALL)


def test_positions_that_are_not_square(tmp_path: Path) -> None:
    path, _ = _weights(tmp_path / "w.safetensors", img_size=[16, 32])
    with pytest.raises(ConfigError, match=r"initial_weights: pos_embed has 32 tokens.*not a sq"):
        start_from(path, build_model(NANO, SMALL), NANO, SMALL)


def test_a_model_of_two_classifiers_of_timms(tmp_path: Path) -> None:
    name = "deit_tiny_distilled_patch16_224"
    shape = {"embed_dim": 32, "depth": 1, "num_heads": 1, "img_size": 32}
    source = timm.create_model(name, num_classes=3, **shape)
    write_tensors(tmp_path / "w.safetensors", source.state_dict(), "null")
    target = timm.create_model(name, num_classes=5, **shape)
    told = start_from(tmp_path / "w.safetensors", target, name, {})
    assert "4 start at zero (head.weight, head.bias, head_dist.weight, head_dist.bias)" in told
    target.pretrained_cfg = None
    with pytest.raises(ConfigError, match=r"of another shape head\.bias"):
        start_from(tmp_path / "w.safetensors", target, name, {})


def test_a_head_of_several_layers_keeps_its_random_weights(tmp_path: Path) -> None:
    def make(classes: int) -> nn.Module:
        model = nn.ModuleDict(
            {"body": nn.Linear(2, 3), "head": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, classes))}
        )
        model.pretrained_cfg = {"classifier": "head"}
        return model

    write_tensors(tmp_path / "w.safetensors", make(3).state_dict(), "null")
    told = start_from(tmp_path / "w.safetensors", target := make(5), "own", {})
    assert told.endswith("4 tensors taken, 2 left at random (head.1.weight, head.1.bias).")
    assert target["head"][1].weight.any()


def test_the_trained_models_line(caplog: pytest.LogCaptureFixture) -> None:
    from vision_ttt.engine.assembly import _log_what_is_trained

    caplog.set_level("INFO")
    model = nn.Linear(3, 2)
    config = resolve({"task": "classification", "model": "m"})
    _log_what_is_trained(config, model, "")
    model.bias.requires_grad_(False)
    config = change(config, {"arguments": {"depth": 1}, "drop_path": 0.0})
    _log_what_is_trained(config, model, "starting")
    assert [record.message for record in caplog.records] == [
        "training m as it is by default: 8 parameters",
        "training m with depth 1, drop_path 0.0: 8 parameters, 2 of them frozen",
        "starting",
    ]


DEIT = "deit_tiny_patch16_224.fb_in1k"
HUB = "vision_ttt.engine.initial_weights.hf_hub_download"


def test_timms_weights_by_name_are_downloaded(
    tmp_path: Path,
    tiny_fields: Callable[..., dict],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    vit = {"patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 1}
    source = timm.create_model("deit_tiny_patch16_224", img_size=24, **vit)
    write_tensors(tmp_path / "hub.safetensors", source.state_dict(), "null")
    asked = []

    def download(hub: str, filename: str) -> Path:
        asked.append((hub, filename))
        return tmp_path / "hub.safetensors"

    monkeypatch.setattr(HUB, download)
    linear = {"model": "linear_vit", "image_size": 16, "epochs": 1}
    linear |= {"arguments": {"base": DEIT, **vit}, "frozen_layers": "inherited"}
    caplog.set_level("INFO")
    result = train(resolve(tiny_fields(**linear, initial_weights=DEIT)))
    assert asked == [(f"timm/{DEIT}", "model.safetensors")]
    assert torch.equal(result.model.patch_embed.proj.weight, source.patch_embed.proj.weight)
    assert f"starting from {tmp_path / 'hub.safetensors'}" in caplog.text
    assert weights_file(f"{NANO}.digits").is_file()
    for absent in ("no.such.file", "deit_tiny_patch16_224.safetensors", "resnet18.pth"):
        assert weights_file(absent) == Path(absent)  # told as such by who reads it
    with pytest.raises(ConfigError, match=f"no weights deit_tiny_patch16_224.x; .* are {DEIT}"):
        weights_file("deit_tiny_patch16_224.x")
    assert len(asked) == 1


def test_weights_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: str, **__: str) -> None:
        raise RuntimeError("no network")  # the hub's errors have no common class

    monkeypatch.setattr(HUB, offline)
    with pytest.raises(ConfigError, match=rf"downloaded from timm/{DEIT} \(no network\); give the"):
        weights_file(DEIT)


@pytest.mark.parametrize(("model", "hint"), [(NANO, ""), ("test_vit", "; --initial-weights test_")])
def test_random_weights_are_told(
    tiny_fields: Callable[..., dict], caplog: pytest.LogCaptureFixture, model: str, hint: str
) -> None:
    caplog.set_level("INFO")
    arguments = SMALL if model == NANO else {"depth": 1}
    fields = tiny_fields(model=model, arguments=arguments, epochs=1)
    train(resolve(fields))
    assert f"starting from random weights{hint}" in caplog.text
    assert ("downloads weights of timm" in caplog.text) == bool(hint)
    caplog.clear()
    train(resolve(fields), resume=True)
    assert "random weights" not in caplog.text
