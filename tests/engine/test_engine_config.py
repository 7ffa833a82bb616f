"""Configs and recipes: ranges, types, unknown keys."""

import dataclasses
from pathlib import Path

import pytest
import timm
import torch
import yaml

from vision_ttt import recipes
from vision_ttt.engine import ConfigError, TrainConfig
from vision_ttt.engine.config import _RANGES, FIELDS
from vision_ttt.models.vittt_ablations import ABLATIONS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("batch_size", -1),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("label_smoothing", 1.0),
        ("test_fraction", 1.0),
        ("crop_scale", 0.0),
        ("ema_decay", 1.0),
        ("precision", "float16"),
        ("model", ""),
    ],
)
def test_value_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*must be"):
        TrainConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("epochs", "3"), ("epochs", 1.5), ("mixup", None)])
def test_wrong_type_is_named(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{field} is"):
        TrainConfig(**{field: value})


def test_values_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="multiple of accumulation_steps"):
        TrainConfig(batch_size=10, accumulation_steps=3)
    with pytest.raises(ConfigError, match="even"):
        TrainConfig(batch_size=10, accumulation_steps=2, mixup=0.8)
    with pytest.raises(ConfigError, match="warmup_epochs"):
        TrainConfig(epochs=2, warmup_epochs=3)


def test_every_number_has_a_range_and_every_field_its_help() -> None:
    import docstring_parser

    numbers = {f.name for f in dataclasses.fields(TrainConfig) if "int" in str(f.type)}
    numbers |= {f.name for f in dataclasses.fields(TrainConfig) if "float" in str(f.type)}
    numbers -= {"precision", "non_finite", "sharding"}
    assert numbers == set(_RANGES)
    documented = docstring_parser.parse_from_object(TrainConfig)
    assert {p.arg_name for p in documented.params if p.description} == set(FIELDS)


@pytest.mark.parametrize("name", recipes.available())
def test_packaged_recipe_loads(name: str) -> None:
    stages = recipes.load_stages(name)
    for stage, config in stages.items():
        assert timm.is_model(config.model)
        assert Path(config.output) == Path("runs", name, stage)
    text = (Path(recipes.__file__).parent / f"{name}.yaml").read_text(encoding="utf-8")
    header = text[: text.index("\nmodel:")]
    assert f"train {name}" in header
    assert "hardware:" in header
    assert "result:" in header
    assert ("hours:" in header and "ot yet run by us" in header) or name.startswith("digits")


def test_stages_begin_where_the_one_before_ended() -> None:
    first, second, third = recipes.load_stages("three-stage", {"seed": 7}).values()
    assert [each.image_size for each in (first, second, third)] == [128, 224, 224]
    assert [each.epochs for each in (first, second, third)] == [300, 100, 20]
    assert first.initial_weights is None
    for before, after in ((first, second), (second, third)):
        assert after.initial_weights == f"{before.output}/last.safetensors"
    assert {each.seed for each in (first, second, third)} == {7}
    with pytest.raises(ConfigError, match=r"several stages: pretrain-128, train-224"):
        recipes.load("three-stage")


@pytest.mark.parametrize("base", ["digits", "imagenet-vittt-tiny"])
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_ablation_of_a_recipe(base: str, ablation: str) -> None:
    plain, config = recipes.load(base), recipes.load(f"{base}+{ablation}")
    assert config.output == f"runs/{base}+{ablation}"
    arguments = {**plain.model_args, **ABLATIONS[ablation].keywords}
    assert config == dataclasses.replace(plain, model_args=arguments, output=config.output)
    with torch.device("meta"):
        timm.create_model(config.model, **config.model_args)


def test_recipe_from_a_file_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("epochs: 5\nlearning_rate: 1e-4\nwarmup_epochs: 0\n")
    config = recipes.load(str(path), {"epochs": 7})
    # PyYAML reads 1e-4, without a point, as text.
    assert (config.epochs, config.learning_rate) == (7, 1e-4)
    path.write_text(yaml.safe_dump(dataclasses.asdict(config)))
    assert recipes.load(str(path)) == config


def test_bad_recipes_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    with pytest.raises(FileNotFoundError, match=r"mine\.yaml"):
        recipes.load(str(path))
    with pytest.raises(ConfigError, match=r"unknown recipe 'digitz'.*digits.*folder"):
        recipes.load("digitz")
    path.write_text("epohcs: 3")
    with pytest.raises(ConfigError, match=r"'epohcs'; nearest: epochs"):
        recipes.load(str(path))
    path.write_text("epochs: many\nwarmup_epochs: 0")
    with pytest.raises(ConfigError, match=r"epochs.*many"):
        recipes.load(str(path))
    with pytest.raises(ConfigError, match=r"unknown ablation 'duel'; known are .*dual"):
        recipes.load("digits+duel")
    path.write_text("stages: {one: {epohcs: 3}}")
    with pytest.raises(ConfigError, match=r"stage one.*'epohcs'; nearest: epochs"):
        recipes.load(str(path))
    path.write_text("stages: []")
    with pytest.raises(ConfigError, match="stages must map names to fields"):
        recipes.load(str(path))
    path.write_text("- epochs")
    with pytest.raises(ConfigError, match="must map"):
        recipes.load(str(path))
    path.write_text("epochs: [")
    with pytest.raises(ConfigError, match="not YAML"):
        recipes.load(str(path))
