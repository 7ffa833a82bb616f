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
from vision_ttt.models import create_model, is_model
from vision_ttt.models.arguments import FUSED
from vision_ttt.models.vittt_ablations import ABLATIONS

FUSED_ON = dict.fromkeys(FUSED, True)


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
        ("initial_weights", ""),
        ("auto_augment", ""),
        ("dataset_root", ""),
        ("wandb_project", ""),
        ("test_split", ""),
        ("output", "runs/\0"),
        ("frozen_layers", -1),
        ("frozen_layers", "every"),
        ("num_workers", 257),
        ("num_workers", 99999999999999999999),
        ("loader_timeout", 1e30),
        ("image_size", 10**6),
        ("noise_steps", 10**12),
        ("repeated_augmentation", 10**12),
    ],
)
def test_value_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*must be"):
        TrainConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("epochs", "3"), ("epochs", 1.5), ("mixup", None), ("seed", True)),
        *(("compile", "no"), ("skip_bad", 1), ("model_args", None)),
    ],
)
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
    with pytest.raises(ConfigError, match=r"color_jitter is 0\.3; beside .*'rand-m9'.* must be 0"):
        TrainConfig(color_jitter=0.3, auto_augment="rand-m9")
    TrainConfig(color_jitter=0.3, auto_augment="3a")
    with pytest.raises(ConfigError, match=r"model_args is .* not JSON serializable"):
        TrainConfig(model_args={"depth": {1, 2}})


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
        assert is_model(config.model)
        with torch.device("meta"):
            create_model(config.model, **config.model_args)
        if config.model.startswith("vittt_"):
            # Checkpointed, an MLP keeps nothing that fusing it could spare.
            switches = ("fused",) if config.gradient_checkpointing else FUSED
            assert config.model_args == dict.fromkeys(switches, True)
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


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("digits+dual", {"depth": 1}, {**FUSED_ON, "design": "dual", "depth": 1}),
        ("digits+dual", {"design": "conv1d"}, {**FUSED_ON, "design": "conv1d"}),
        ("digits+dual", {"design": None, "depth": 2}, {**FUSED_ON, "depth": 2}),
        ("digits+gating", {}, {**FUSED_ON, "design": "gating", "fused": False}),
        ("digits", dict.fromkeys(FUSED), {}),
        ("digits-diffusion", {"depth": 1}, {"learn_sigma": False, "depth": 1}),
    ],
)
def test_model_args_add_to_the_recipes(recipe: str, overrides: dict, expected: dict) -> None:
    assert recipes.load(recipe, {"model_args": overrides}).model_args == expected


def test_model_args_add_up_over_recipe_stage_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "staged.yaml"
    stages = {"one": {"model_args": {"depth": 2}}, "two": {"model_args": {"design": None}}}
    path.write_text(yaml.safe_dump({"model_args": {"design": "dual"}, "stages": stages}))
    one, two = recipes.load_stages(str(path), {"model_args": {"num_heads": 6}}).values()
    assert one.model_args == {"design": "dual", "depth": 2, "num_heads": 6}
    assert two.model_args == {"num_heads": 6}


def test_fewer_epochs_take_the_warm_up_with_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert recipes.load("folder", {"epochs": 2}).warmup_epochs == 0.2  # 3 of 30
    assert "warmup_epochs: 0.2 instead of the recipe's 3, as epochs are 2 instead of" in caplog.text
    caplog.clear()
    assert recipes.load("folder", {"epochs": 60}).warmup_epochs == 3
    assert recipes.load("folder", {"epochs": 2, "warmup_epochs": 1}).warmup_epochs == 1
    assert not caplog.text
    with pytest.raises(ConfigError, match=r"warmup_epochs is 3.* at most epochs \(2\)"):
        recipes.load("folder", {"epochs": 2, "warmup_epochs": 3})
    stages = recipes.load_stages("three-stage", {"epochs": 10}).values()
    assert [stage.warmup_epochs for stage in stages] == [0.166667, 0.5, 2.5]


_BOMB = b"model_args:\n  a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + b"".join(
    b"  %c: &%c [%s]\n" % (98 + i, 98 + i, b", ".join([b"*%c" % (97 + i)] * 9)) for i in range(9)
)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"epochs: 3\nmodel: \xff", "not a text in UTF-8: byte 17 is 0xff"),
        (b"a: " + b"[" * 100_000, "nested too deeply"),
        (b"model_args: " + b"{a: " * 3000 + b"1" + b"}" * 3000, "nested too deeply"),
        (b"model_args: &a {x: *a}", "nested too deeply"),
        (_BOMB, "holds more than 10,000 values"),
        (b"epochs: 3\nepochs: 4", "the key 'epochs' comes twice"),
        (b"model_args: {depth: 1, depth: 2}", "the key 'depth' comes twice"),
        (b"? [a]\n: 1", "unhashable key"),
        (b"seed: 2020-13-45", "not YAML"),
        (b"epochs: \0", "not YAML"),
        (b"model_args: null", "model_args is None"),
        (b"model_args: {a: 2020-01-01}", "not JSON serializable"),
        (b"stages: {1: {}}", "1 cannot be the name of a stage"),
        (b"stages: {../up: {}}", "cannot be the name of a stage"),
    ],
)
def test_hostile_recipes_are_explained(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        recipes.load_stages(str(path))


def test_a_recipe_may_use_an_anchor(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("stages:\n  a: &x {epochs: 30}\n  b: {<<: *x, seed: 1}\n")
    one, two = recipes.load_stages(str(path)).values()
    assert (one.epochs, one.seed, two.epochs, two.seed) == (30, 0, 30, 1)


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
