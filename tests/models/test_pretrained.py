"""The weights that come with the package: what they give, and that timm loads them as its own."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from described_models import describe_classifier
from tolerances import assert_close
from vision_ttt.data import fashion_mnist
from vision_ttt.data.digits import Digits
from vision_ttt.dense import build_segmenter
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import ModelMetadata, read_weights, save_weights
from vision_ttt.engine.config import ConfigError
from vision_ttt.models.packaged_weights import weights_cfg
from vision_ttt.models.registry import create_model
from vision_ttt.pretrained import FOLDER, list_pretrained, pretrained_of, weights_path

DIGITS = ["vit3_nano_patch4_32.digits", "vittt_nano_patch4_32.digits"]
FASHION = ["vit3_nano_patch4_32.fashion_mnist", "vittt_nano_patch2_28.fashion_mnist"]
of_each = pytest.mark.parametrize("name", list_pretrained())
VITTT = "vittt_nano_patch4_32"


def loaded(name, **options):
    return timm.create_model(name, pretrained=True, **options).eval()


def stored(name):
    return load_file(weights_path(name))


@pytest.mark.parametrize("name", DIGITS)
def test_gives_the_committed_accuracy(name):
    model, test_set = loaded(name), Digits("test")
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    images = torch.stack([transform(image) for image in test_set.images])
    with torch.inference_mode():
        right = model(images).argmax(-1) == torch.tensor(test_set.targets)
    _, metadata = read_weights(Path(weights_path(name)))
    assert len(right) == 500
    assert right.float().mean().item() == pytest.approx(metadata.metrics["test_accuracy"])
    assert metadata.metrics["test_accuracy"] > 0.95


@pytest.mark.slow
@pytest.mark.skipif(not fashion_mnist.INSTALLED.is_dir(), reason="needs dataset-fashion-mnist")
@pytest.mark.parametrize("name", FASHION)
def test_gives_the_committed_accuracy_on_photographs(name):
    model, test_set = loaded(name), fashion_mnist.FashionMNIST("test")
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    right = 0
    for start in range(0, len(test_set), 500):
        images, labels = zip(*(test_set[i] for i in range(start, start + 500)), strict=True)
        with torch.inference_mode():
            logits = model(torch.stack([transform(image) for image in images]))
        right += (logits.argmax(-1) == torch.tensor(labels)).sum().item()
    _, metadata = read_weights(Path(weights_path(name)))
    assert right / len(test_set) == pytest.approx(metadata.metrics["test_accuracy"], abs=2e-4)


def test_there_are_those_that_the_documents_name():
    assert set(list_pretrained()) == {*DIGITS, *FASHION}
    assert pretrained_of(VITTT) == [f"{VITTT}.digits"]
    assert set(list_pretrained()) <= set(timm.list_pretrained())
    assert sum(file.stat().st_size for file in FOLDER.glob("*.safetensors")) < 6e6
    assert weights_path("runs/a.safetensors") == "runs/a.safetensors"


@of_each
def test_weights_are_halves_and_have_a_card(name):
    weights, metadata = read_weights(Path(weights_path(name)))
    assert {value.dtype for value in weights.values()} == {torch.float16}
    card = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert card.startswith(f"# {name}\n")
    for key, value in metadata.metrics.items():
        assert f"- {key.removeprefix('test_').replace('_', ' ')}: {value:.4g}\n" in card
    assert re.search(r"## Limits\n\n\w.{40}", card)


@of_each
def test_models_are_float32_and_nothing_is_unpickled(name, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a pickle is opened")

    monkeypatch.setattr(torch, "load", refuse)
    weights, model = stored(name), loaded(name)
    assert model.state_dict().keys() == weights.keys()
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, weights[key].float().reshape_as(value))
    assert model.pretrained_cfg["tag"] == name.partition(".")[2]


@of_each
def test_timm_adapts_them(name):
    weights = stored(name)
    other = loaded(name, num_classes=3, in_chans=1)
    assert other.head.weight.shape[0] == 3
    grey = weights["patch_embed.proj.weight"].float().sum(1, keepdim=True)
    assert_close(other.patch_embed.proj.weight, grey.half().float(), 1e-6)
    assert torch.equal(other.norm.weight, weights["norm.weight"].float())

    images = torch.randn(1, 3, 64, 64)
    maps = loaded(name, features_only=True, out_indices=(1,), img_size=64)(images)
    side = 64 // weights["patch_embed.proj.weight"].shape[-1]
    assert [tuple(x.shape) for x in maps] == [(1, 96, side, side)]
    assert loaded(name, num_classes=0, img_size=64)(images).shape == (1, 96)


def test_without_a_tag_a_model_stays_as_it_was():
    with torch.device("meta"):
        model = timm.create_model(VITTT)
    assert model.num_classes == 1000
    assert "file" not in model.pretrained_cfg
    with pytest.raises(RuntimeError, match=rf"tags, but no tag is given; .* {VITTT}\.digits$"):
        timm.create_model(VITTT, pretrained=True)
    with pytest.raises(RuntimeError, match="No pretrained weights exist for vim_nano_patch4_32"):
        timm.create_model("vim_nano_patch4_32", pretrained=True)
    with pytest.raises(RuntimeError, match=r"Invalid pretrained tag \(letter\)"):
        timm.create_model(f"{VITTT}.letter", pretrained=True)
    assert create_model(f"{VITTT}.digits", pretrained=True).num_classes == 10


@pytest.fixture
def packaging():
    """The script that puts weights into the package."""
    path = Path(__file__).parents[2] / "packaging/package_weights.py"
    specification = importlib.util.spec_from_file_location("package_weights", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_weights_become_packaged_ones(packaging, tmp_path, monkeypatch):
    """Those of the package, as the run that they are from left them."""
    name = f"{VITTT}.digits"
    weights, metadata = read_weights(Path(weights_path(name)))
    card = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    run, made = tmp_path / "run", tmp_path / "made"
    run.mkdir()
    made.mkdir()
    save_weights(run / "last.safetensors", {k: x.float() for k, x in weights.items()}, metadata)
    (run / "config.yaml").write_text(re.search(r"```yaml\n(.*)```", card, re.DOTALL)[1])
    device = {"device_name": "CPU", "threads": 1, "versions": {"torch": "2", "timm": "1"}}
    (run / "environment.json").write_text(json.dumps(device))
    figures = {"images": 500, "loss": 0.5, "accuracy": 0.25, "classes": []}
    monkeypatch.setattr(packaging, "evaluated", lambda file: figures)
    checkpoint = str(run / "last.safetensors")
    packaging.main([checkpoint, "digits", "--limits", "Digits of 8 × 8 pixels."], made)

    again, told = read_weights(made / f"{name}.safetensors")
    assert all(torch.equal(again[key], weights[key]) for key in weights)
    assert told.metrics == {"test_loss": 0.5, "test_accuracy": 0.25}
    text = (made / f"{name}.md").read_text(encoding="utf-8")
    assert "- accuracy: 0.25\n" in text
    assert "Digits of 8 × 8 pixels.\n" in text
    recipe = re.compile(r"## Recipe.*?```yaml\n(.*)```", re.DOTALL)
    assert recipe.search(text)[1] == recipe.search(card)[1]

    with pytest.raises(SystemExit, match=r"tag 'two\.words'"):
        packaging.main([checkpoint, "two.words", "--limits", "none"], made)
    weights["norm.bias"] = torch.full_like(weights["norm.bias"], 1e5, dtype=torch.float32)
    save_weights(run / "last.safetensors", weights, metadata)
    with pytest.raises(SystemExit, match=r"norm\.bias holds 1.*65,504"):
        packaging.main([checkpoint, "digits", "--limits", "none"], made)


@pytest.mark.parametrize("own", [{"depth": 1}, {"mini_batch_size": 8}], ids=["shapes", "values"])
def test_a_model_that_its_name_does_not_tell_is_not_packaged(packaging, tmp_path, own):
    arguments = {"num_classes": 3, **own}
    model = timm.create_model(VITTT, **arguments)
    data = timm.data.resolve_model_data_config(model)
    path = tmp_path / "last.safetensors"
    save_weights(path, model.state_dict(), describe_classifier(VITTT, arguments, "abc", data))
    with pytest.raises(SystemExit, match="register a model with these arguments"):
        packaging.main([str(path), "own", "--limits", "none"], tmp_path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("own", [{}, {"mini_batch_size": 8}], ids=["its_name", "own_arguments"])
def test_segmenters_are_packaged_where_timm_makes_their_tokens(
    packaging, tmp_path, monkeypatch, own
):
    name, classes = "vittt_nano_patch8_256", ["background", "A", "E"]
    arguments = {"num_classes": 3, "dense": {"maps": "tokens"}, **own}
    told = {"longer_side": 512, "test_shorter_side": 256, "window": 512, "stride": 341}
    metadata = ModelMetadata(
        {"name": "segmentation", "maps": "tokens"},
        name,
        arguments,
        {
            "classes": classes,
            "palette": [[0, 0, 0]] * 3,
            "input": {**told, "evaluation": "whole", "mean": [0.5] * 3, "std": [0.25] * 3},
        },
        data={"root": "shapes", "root_options": {"side": 256, "classes": 2}},
        update=1500,
    )
    model = build_segmenter(name, **arguments)
    save_weights(tmp_path / "last.safetensors", model.state_dict(), metadata)
    (tmp_path / "config.yaml").write_text("task: {name: segmentation}\nrun: {seed: 0}\n")
    device = {"device_name": "CPU", "threads": 1, "versions": {"torch": "2", "timm": "1"}}
    (tmp_path / "environment.json").write_text(json.dumps(device))
    monkeypatch.setattr(packaging, "evaluated", lambda file: {"images": 64, "miou": 0.5})
    words = [str(tmp_path / "last.safetensors"), "own", "--limits", "none"]
    if own:
        with pytest.raises(SystemExit, match="register a model with these arguments"):
            packaging.main(words, tmp_path)
        return
    packaging.main(words, tmp_path)
    card = (tmp_path / f"{name}.own.md").read_text(encoding="utf-8")
    assert "trained for 1,500 updates by" in card
    assert "- Data: `shapes` (side 256, classes 2), its part for training.\n" in card
    assert "- miou: 0.5\n" in card
    cfg = weights_cfg(str(tmp_path / f"{name}.own.safetensors"))
    assert (cfg["input_size"], cfg["crop_pct"], cfg["mean"]) == ((3, 256, 256), 1.0, (0.5,) * 3)
    assert cfg["label_names"] == tuple(classes)


def test_the_name_of_weights_is_no_models():
    with pytest.raises(ConfigError, match=rf"starts from them by --initial-weights {VITTT}"):
        build_model(f"{VITTT}.digits", {})
