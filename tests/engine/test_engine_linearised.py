"""Training a linearised ViT: the ViT's weights, the rate of what is new, resuming."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from interrupted_runs import train_until
from vision_ttt.engine import ConfigError, train
from vision_ttt.engine.building import build_model
from vision_ttt.engine.initial_weights import start_from
from vision_ttt.engine.metrics import largest_rate
from vision_ttt.engine.optimisation import Length, make_optimizer, make_scheduler
from vision_ttt.engine.tensor_files import write_tensors
from vision_ttt.recipes import load, resolve
from vision_ttt.tasks.checkpoints import load_model

Fields = Callable[..., dict[str, Any]]
BASE = "vit_small_patch14_reg4_dinov2"
SHAPE = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8, "no_embed_class": False}
LINEAR = {"base": BASE, **SHAPE}


def _vit(path: Path, **arguments: Any) -> nn.Module:
    """A ViT whose weights are in a file of another program."""
    model = timm.create_model(BASE, **{**SHAPE, "img_size": 24, "num_classes": 3, **arguments})
    write_tensors(path, model.state_dict(), "null")
    return model


def test_a_linear_model_starts_from_its_vit_s_weights(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    vit = _vit(path)
    arguments = {**LINEAR, "num_classes": 5, "img_size": 32}
    model = build_model("linear_vit", arguments)
    inner = model.blocks[0].attn.inner.w1.clone()
    told = start_from(path, model, "linear_vit", arguments)
    new = sum(".attn.inner." in key for key in model.state_dict())
    taken = len(model.state_dict()) - new - 2
    assert f": {taken} tensors taken, 1 of them interpolated (pos_embed), 2 start at zero" in told
    assert f" {new} left at random (blocks.0.attn.inner.w1, " in told
    assert told.endswith("1 of the file left out (cls_token).")
    assert torch.equal(model.blocks[1].attn.qkv.weight, vit.blocks[1].attn.qkv.weight)
    registers = vit.reg_token + vit.pos_embed[:, 1:5]
    assert torch.equal(model.class_tokens.tokens, registers)
    assert torch.equal(model.blocks[0].attn.inner.w1, inner)
    # The linear model's own are taken whole.
    write_tensors(path, model.state_dict(), "null")
    again = build_model("linear_vit", arguments)
    told = start_from(path, again, "linear_vit", arguments)
    assert told.endswith(f": {len(model.state_dict())} tensors taken.")
    assert torch.equal(again.blocks[0].attn.inner.w1, inner)


def test_another_vit_s_weights_are_refused(tmp_path: Path) -> None:
    _vit(tmp_path / "w.safetensors", embed_dim=48)
    model = build_model("linear_vit", {**LINEAR, "num_classes": 3, "img_size": 24})
    with pytest.raises(ConfigError, match=r"does not fit LinearViT: .*of another shape"):
        start_from(tmp_path / "w.safetensors", model, "linear_vit", LINEAR)


@pytest.mark.parametrize(
    "damaged",
    [
        {"cls_token": torch.zeros(3)},
        {"reg_token": torch.zeros(1, 4, 7)},
        {"pos_embed": torch.zeros(2)},
        {"blocks.0.attn.q_proj.weight": torch.zeros(32, 32)},
    ],
    ids=str,
)
def test_damaged_weights_are_refused(tmp_path: Path, damaged: dict[str, torch.Tensor]) -> None:
    weights = _vit(tmp_path / "w.safetensors").state_dict()
    write_tensors(tmp_path / "w.safetensors", {**weights, **damaged}, "null")
    model = build_model("linear_vit", {**LINEAR, "num_classes": 3, "img_size": 24})
    with pytest.raises(ConfigError, match="initial_weights: these are not the weights of a whole"):
        start_from(tmp_path / "w.safetensors", model, "linear_vit", LINEAR)


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_new_parameters_have_a_rate_of_their_own(layer_decay: float | None) -> None:
    model = build_model("linear_vit", {**LINEAR, "num_classes": 3, "img_size": 24})
    fields = {"task": "classification", "new_parameters_rate": 20, "layer_decay": layer_decay}
    optimisation = resolve({**fields, "learning_rate": 1e-3, "epochs": 2}).optimisation
    optimizer = make_optimizer(model, optimisation)
    scheduler = make_scheduler(optimizer, optimisation, Length.of(optimisation, 10, 1))
    scheduler.step_update(0)
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert rates.keys() == {id(p) for p in model.parameters()}
    block, head = model.blocks[1].attn, rates[id(model.head.weight)]
    assert head == largest_rate(optimizer) == pytest.approx(1e-3)
    for new in (block.inner.w1, block.inner.q_conv.weight, block.inner.q_conv.bias):
        assert rates[id(new)] == pytest.approx(20 * rates[id(block.qkv.weight)])
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays[id(block.inner.w1)] == 0
    assert decays[id(block.qkv.weight)] == decays[id(block.inner.q_conv.weight)] == 0.05


def test_a_model_without_new_parameters_has_no_such_rate() -> None:
    optimisation = resolve({"task": "classification", "new_parameters_rate": 2}).optimisation
    with pytest.raises(ConfigError, match=r"new_parameters_rate is 2.*must be 1.*only linear_vit"):
        make_optimizer(timm.create_model("vit3_nano_patch4_32"), optimisation)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_rate_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="new_parameters_rate"):
        resolve({"task": "classification", "new_parameters_rate": value})


def test_a_run_resumes_as_the_same_run_and_its_model_loads_alone(
    tiny_fields: Fields, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _vit(tmp_path / "w.safetensors")
    own = {"model": "linear_vit", "arguments": LINEAR, "image_size": 24, "drop_path": 0.0}
    own |= {"new_parameters_rate": 20, "initial_weights": str(tmp_path / "w.safetensors")}
    with caplog.at_level("INFO"):
        whole = train(resolve(tiny_fields(**own, output=str(tmp_path / "whole"))))
    assert "new parameters learn at 20 times the learning rate" in caplog.text
    config = resolve(tiny_fields(**own, output=str(tmp_path / "run")))
    train_until(config, 5)
    (tmp_path / "w.safetensors").unlink()  # neither resuming nor loading needs it
    resumed = train(config, resume=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name
    loaded, _ = load_model(resumed.run_dir / "last.safetensors")
    x = torch.randn(1, 3, 32, 40)  # another size than in training
    assert torch.equal(loaded.eval()(x), resumed.model.eval()(x))


def test_the_recipe_has_the_published_rates() -> None:
    own = load("linearize-imagenet").optimisation
    assert (own.epochs, own.batch_size, own.warmup) == (30, 2048, 5)
    assert (own.learning_rate, own.minimum_learning_rate) == (2e-5, 2e-7)
    assert (own.weight_decay, own.new_parameters_rate) == (0.05, 20)
