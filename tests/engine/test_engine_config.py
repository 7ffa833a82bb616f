"""Configs and recipes: ranges, types, unknown keys."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import ClassVar, get_args

import pytest
import timm
import torch
import yaml
from timm.layers import DropPath

from vision_ttt import recipes, tasks
from vision_ttt.data.documents import find_documents
from vision_ttt.dense import build_detector, build_segmenter
from vision_ttt.engine import ConfigError
from vision_ttt.engine.config import LENGTHS, OptimisationSection, section_types
from vision_ttt.engine.initial_weights import weights_file
from vision_ttt.engine.section import Section, field_types
from vision_ttt.models import create_model, is_model
from vision_ttt.models.mamba_reg_ablations import ABLATIONS as MAMBA_REG
from vision_ttt.models.vittt_ablations import ABLATIONS
from vision_ttt.recipes import change, resolve
from vision_ttt.recipes.names import short_names
from vision_ttt.tasks.language.models import build_language_model, model_arguments

PACKAGED = ("classification", "diffusion")
"""Tasks; other tests may add theirs to the table."""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("batch_size", -1),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("label_smoothing", 1.0),
        ("test_fraction", 1.0),
        ("train_fraction", 0.0),
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
    ],
)
def test_value_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*must be"):
        _section(field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("epochs", "3"), ("epochs", 1.5), ("mixup", None), ("seed", True)),
        *(("compile", "no"), ("skip_bad", 1), ("arguments", None)),
    ],
)
def test_wrong_type_is_named(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{field} is"):
        _section(field, value)


def _section(field: str, value: object) -> Section:
    """The section of a field, with a value for it."""
    task = next(t for t in map(tasks.find, PACKAGED) if field in short_names(t))
    section, name = short_names(task)[field]
    return section_types(task)[section](**{name: value})


def test_values_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="multiple of accumulation_steps"):
        resolve({"task": "classification", "batch_size": 10, "accumulation_steps": 3})
    with pytest.raises(ConfigError, match="even"):
        resolve({"task": "classification", "batch_size": 10, "accumulation_steps": 2, "mixup": 0.8})
    for task in PACKAGED:
        with pytest.raises(ConfigError, match=r"repeated_augmentation is 9.* batch_size \(8\)"):
            resolve({"task": task, "batch_size": 8, "repeated_augmentation": 9})
    with pytest.raises(ConfigError, match="warmup"):
        resolve({"task": "classification", "epochs": 2, "warmup": 3})
    with pytest.raises(ConfigError, match=r"color_jitter is 0\.3; beside .*'rand-m9'.* must be 0"):
        resolve({"task": "classification", "color_jitter": 0.3, "auto_augment": "rand-m9"})
    resolve({"task": "classification", "color_jitter": 0.3, "auto_augment": "3a"})
    with pytest.raises(ConfigError, match=r"arguments is .* not JSON serializable"):
        resolve({"task": "classification", "arguments": {"depth": {1, 2}}})


@pytest.mark.parametrize("task", PACKAGED)
def test_every_number_has_a_range_and_every_field_its_help(task: str) -> None:
    import docstring_parser

    for section in section_types(tasks.find(task)).values():
        types = field_types(section)
        for field in dataclasses.fields(section):
            kinds = {types[field.name], *get_args(types[field.name])}
            assert ("accepted" in field.metadata) == bool(kinds & {int, float}), field.name
        documented = docstring_parser.parse_from_object(section)
        told = {p.arg_name for p in documented.params if p.description}
        assert told >= set(types)


def test_one_length_and_what_it_counts() -> None:
    assert resolve({"task": "classification"}).optimisation.length == ("epochs", 300)
    assert resolve({"task": "classification", "updates": 9}).optimisation.length == ("updates", 9)
    with pytest.raises(ConfigError, match="epochs 3, updates 9: only one of epochs"):
        resolve({"task": "classification", "epochs": 3, "updates": 9})
    config = recipes.load("digits", {"units": 64_000})  # 12 epochs, of them 1 to warm up
    assert config.optimisation.length == ("units", 64_000)
    assert config.optimisation.warmup == pytest.approx(64_000 / 12)
    assert config.optimisation.epochs is None


def test_names_short_and_long() -> None:
    given = {"epochs": 3, "model": "vittt_tiny_patch16_224", "seed": 4}
    long = {"optimisation.epochs": 3, "model.name": "vittt_tiny_patch16_224", "run": {"seed": 4}}
    assert recipes.load("digits", given) == recipes.load("digits", long)
    with pytest.raises(ConfigError, match=r"unknown key 'mixupp'; nearest .*: task\.mixup"):
        recipes.load("digits", {"mixupp": 1})
    with pytest.raises(ConfigError, match=r"unknown key 'model\.epochs'.*optimisation\.epochs"):
        recipes.load("digits", {"model.epochs": 1})
    with pytest.raises(ConfigError, match=r"'mixup': task\.mixup is of task classification"):
        recipes.load("digits-diffusion", {"mixup": 1})
    with pytest.raises(ConfigError, match="names no task; set task to one of classification, det"):
        resolve({"epochs": 1})
    with pytest.raises(ConfigError, match="unknown task 'tracking'"):
        resolve({"task": "tracking"})


def test_sections_of_another_task_are_refused() -> None:
    config = resolve({"task": "classification"})
    with pytest.raises(TypeError, match="data is a RunSection; ImageData is needed"):
        dataclasses.replace(config, data=config.run)


PUBLISHED = [
    name
    for name in recipes.available()
    if name.startswith(("imagenet-", "coco-", "ade20k-", "three-stage"))
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_default_leaks_into_a_published_recipe(name: str) -> None:
    """What its authors trained with is in the recipe, whatever the fields' defaults become."""
    stages = recipes.read(name)
    for own in (stages.pop("stages", None) or {"": {}}).values():
        told = recipes.merge(stages, own)["optimisation"]
        free = {*LENGTHS, "accumulation_steps", "inner_warmup", "non_finite", "new_parameters_rate"}
        for used, fields in (
            ("polynomial", {"power"}),
            ("steps", {"decay_at", "decay_rate"}),
        ):
            free |= fields if told["schedule"] != used else set()
        if told["schedule"] == "steps":
            free |= {"minimum_learning_rate"}
        every = {field.name for field in dataclasses.fields(OptimisationSection)}
        assert every - free <= told.keys()
        assert len(told.keys() & set(LENGTHS)) == 1


@pytest.mark.parametrize(
    ("name", "rates", "weight_decays", "ema_decay"),
    [
        ("imagenet-vim-tiny", [1e-3], [0.1], 0.99996),
        ("imagenet-vim-small", [1e-3], [0.05], 0.99996),
        ("imagenet-vim-base", [1e-3], [0.05], 0.99996),
        ("imagenet-mambar-tiny", [1e-3], [0.05], 0.0),
        ("imagenet-mambar-small", [1e-3, 4e-4, 1e-5], [0.05, 0.05, 0.1], 0.0),
        ("imagenet-mambar-base", [8e-4, 4e-4, 1e-5], [0.05, 0.05, 0.1], 0.0),
        ("imagenet-mambar-large", [8e-4, 4e-4, 1e-5], [0.05, 0.05, 0.1], 0.0),
    ],
)
def test_vim_and_mamba_reg_are_optimised_as_released(
    name: str, rates: list[float], weight_decays: list[float], ema_decay: float
) -> None:
    """As DeiT's training code has it: no clipping, and a cosine from 1e-6 that ends at 1e-5."""
    runs = [each.optimisation for each in recipes.load_stages(name).values()]
    assert [each.learning_rate for each in runs] == rates
    assert [each.weight_decay for each in runs] == weight_decays
    for each in runs:
        assert (each.schedule, each.warmup, each.clip_norm) == ("cosine", 5, 0.0)
        assert (each.warmup_learning_rate, each.minimum_learning_rate) == (1e-6, 1e-5)
        assert (each.beta1, each.beta2, each.layer_decay) == (0.9, 0.999, None)
        assert each.ema_decay == ema_decay


def test_class_variables_of_sections_have_a_type() -> None:
    """Python 3.10 refuses a bare ClassVar where the types of the fields are read."""
    found = [tasks.find(name) for name in tasks.TASKS]  # which imports them
    kinds = [Section, *_subclasses(Section)]
    assert {*found} <= {*kinds}
    for kind in kinds:
        bare = [n for n, a in inspect.get_annotations(kind).items() if a in ("ClassVar", ClassVar)]
        assert bare == [], kind


def _subclasses(kind: type) -> list[type]:
    own = kind.__subclasses__()
    return [*own, *(each for child in own for each in _subclasses(child))]


@pytest.mark.parametrize("name", recipes.available())
def test_packaged_recipe_loads(name: str) -> None:
    stages = recipes.load_stages(name)
    for stage, config in stages.items():
        if config.task.name == "language":  # a model of transformers
            pytest.importorskip("vision_ttt.language", exc_type=ImportError)
            decided = {"vocab_size": 257, "end": 256, "context": config.data.context}
            model = config.model
            arguments = model_arguments(model.name, model.arguments, **decided)
            with torch.device("meta"):
                build_language_model(model.name, arguments)
            continue
        assert is_model(config.model.name)
        with torch.device("meta"):
            create_model(config.model.name, **config.model.arguments)
        assert Path(config.run.output) == Path("runs", name, stage)
    text = (Path(recipes.__file__).parent / f"{name}.yaml").read_text(encoding="utf-8")
    header = text[: re.search(r"^[a-z]", text, re.MULTILINE).start()]
    offline = name.startswith(("digits", "scenes", "text"))
    assert f"train {name}" in header or "demo-dense" in header
    assert "hardware:" in header
    assert "result:" in header
    assert ("hours:" in header and "ot yet run by us" in header) or offline


@pytest.mark.parametrize(
    "name",
    [*(f"ade20k-vittt-{size}" for size in ("tiny", "small", "base")), "coco-vittt-layer-decay"],
)
def test_drop_path_of_vision_rwkv_is_also_of_the_adapter(name: str) -> None:
    config = recipes.load(name)
    rate = config.model.drop_path
    dense = {"maps": config.task.maps, **config.task.parts}
    with torch.device("meta"):
        build = build_detector if config.task.name == "detection" else build_segmenter
        model = build(config.model.name, num_classes=2, dense=dense, drop_path_rate=rate)
    interactions = model.get_submodule("maps.interactions").modules()
    rates = [module.drop_prob for module in interactions if isinstance(module, DropPath)]
    assert len(rates) == 6
    assert set(rates) == {rate}


def test_stages_begin_where_the_one_before_ended() -> None:
    first, second, third = recipes.load_stages("three-stage", {"seed": 7}).values()
    assert [each.data.image_size for each in (first, second, third)] == [128, 224, 224]
    assert [each.optimisation.epochs for each in (first, second, third)] == [300, 100, 20]
    assert first.model.initial_weights is None
    for before, after in ((first, second), (second, third)):
        assert after.model.initial_weights == f"{before.run.output}/last.safetensors"
    assert {each.run.seed for each in (first, second, third)} == {7}
    with pytest.raises(ConfigError, match=r"several stages: pretrain-128, train-224"):
        recipes.load("three-stage")


@pytest.mark.parametrize(
    ("base", "ablation"),
    [("digits", "dual"), *(("imagenet-vittt-tiny", name) for name in ABLATIONS)],
)
def test_every_ablation_of_a_recipe(base: str, ablation: str) -> None:
    plain, config = recipes.load(base), recipes.load(f"{base}+{ablation}")
    assert config.run.output == f"runs/{base}+{ablation}"
    arguments = {**plain.model.arguments, **ABLATIONS[ablation].keywords}
    assert config == change(plain, {"arguments": arguments, "output": config.run.output})
    with torch.device("meta"):
        timm.create_model(config.model.name, **config.model.arguments)


def test_an_ablation_starts_from_its_own_weights() -> None:
    for recipe in ("coco-vittt-tiny", "ade20k-vittt-base", "coco-vittt-frozen"):
        size = "base" if "base" in recipe else "tiny"
        config = recipes.load(f"{recipe}+dual")
        assert config.model.initial_weights == f"runs/imagenet-vittt-{size}+dual/best.safetensors"
        assert config.model.arguments["design"] == "dual"
        assert config.run.output == f"runs/{recipe}+dual"
    assert recipes.load("digits+dual").model.initial_weights is None


@pytest.mark.parametrize("ablation", MAMBA_REG)
def test_every_ablation_of_mamba_reg(ablation: str) -> None:
    stages = recipes.load_stages(f"imagenet-mambar-base+{ablation}")
    assert list(stages) == ["pretrain-128", "train-224", "fine-tune-224"]
    for stage, config in stages.items():
        assert config.run.output == f"runs/imagenet-mambar-base+{ablation}/{stage}"
        assert config.model.arguments == MAMBA_REG[ablation].keywords
    with torch.device("meta"):
        model = timm.create_model(config.model.name, **config.model.arguments)
    by_hand = {"mean": 768, "r1": 768, "n1_wide": 2304, "n24": 4608, "front": 2304}
    assert model.head_hidden_size == by_hand.get(ablation, model.head_hidden_size)


def test_stages_take_ablations() -> None:
    first, second, _ = recipes.load_stages("three-stage+dual").values()
    assert first.model.arguments == second.model.arguments == {"design": "dual"}
    assert second.model.initial_weights == "runs/three-stage+dual/pretrain-128/last.safetensors"


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("imagenet-mambar-tiny+dual", "'dual' of mambar_tiny_patch16_224; known are front_r1"),
        ("imagenet-vittt-tiny+mean", "'mean' of vittt_tiny_patch16_224; known are ttt_layer"),
        ("imagenet-vim-tiny+dual", "of vim_tiny_patch16_224; there are none"),
    ],
)
def test_an_ablation_that_the_model_does_not_have(recipe: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        recipes.load(recipe)


def test_a_recipe_of_differences(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits\nmodel: {arguments: {depth: 2}}\noptimisation: {updates: 9}\n")
    config, former = recipes.load(str(path)), recipes.load("digits")
    assert config == change(
        former, {"arguments": {"depth": 2}, "updates": 9, "output": "runs/mine"}
    )
    path.write_text("extends: three-stage\nstages: {train-224: {optimisation: {epochs: 7}}}\n")
    assert [c.optimisation.epochs for c in recipes.load_stages(str(path)).values()] == [300, 7, 20]
    path.write_text("extends: nonsense\n")
    with pytest.raises(ConfigError, match="extends 'nonsense'; packaged are ade20k"):
        recipes.load(str(path))
    path.write_text("extends: digits\noptimisation: {epoch: 3}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'optimisation\.epoch'"):
        recipes.load(str(path))


def test_recipe_from_a_file_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("task: classification\noptimisation: {epochs: 5, learning_rate: 1e-4}\n")
    config = recipes.load(str(path), {"epochs": 7})
    # PyYAML reads 1e-4, without a point, as text.
    assert (config.optimisation.epochs, config.optimisation.learning_rate) == (7, 1e-4)
    path.write_text(yaml.safe_dump(config.as_dict()))
    assert recipes.load(str(path)) == config


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("digits+dual", {"depth": 1}, {"design": "dual", "depth": 1}),
        ("digits+dual", {"design": "conv1d"}, {"design": "conv1d"}),
        ("digits+dual", {"design": None, "depth": 2}, {"depth": 2}),
        ("digits+gating", {}, {"design": "gating"}),
        ("digits-diffusion", {"depth": 1}, {"learn_sigma": False, "depth": 1}),
    ],
)
def test_model_args_add_to_the_recipes(recipe: str, overrides: dict, expected: dict) -> None:
    assert recipes.load(recipe, {"arguments": overrides}).model.arguments == expected


def test_model_args_add_up_over_recipe_stage_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "staged.yaml"
    stages = {
        "one": {"model": {"arguments": {"depth": 2}}},
        "two": {"model": {"arguments": {"design": None}}},
    }
    recipe = {"task": "classification", "model": {"arguments": {"design": "dual"}}}
    path.write_text(yaml.safe_dump({**recipe, "stages": stages}))
    one, two = recipes.load_stages(str(path), {"arguments": {"num_heads": 6}}).values()
    assert Path(one.run.output).parent == Path("runs/staged")
    path = path.rename(tmp_path / "other.yml")
    assert Path(recipes.load_stages(str(path))["one"].run.output) == Path("runs/other/one")
    path = path.rename(tmp_path / "plain")
    assert Path(recipes.load_stages(str(path))["one"].run.output) == Path("runs/plain/one")
    assert one.model.arguments == {"design": "dual", "depth": 2, "num_heads": 6}
    assert two.model.arguments == {"num_heads": 6}


def test_fewer_epochs_take_the_warm_up_with_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert recipes.load("folder", {"epochs": 2}).optimisation.warmup == 0.2  # 3 of 30
    assert "warmup: 0.2 instead of the recipe's 3, as epochs are 2 instead of" in caplog.text
    caplog.clear()
    assert recipes.load("folder", {"epochs": 60}).optimisation.warmup == 3
    assert recipes.load("folder", {"epochs": 2, "warmup": 1}).optimisation.warmup == 1
    assert not caplog.text
    with pytest.raises(ConfigError, match=r"warmup is 3.* at most epochs \(2\)"):
        recipes.load("folder", {"epochs": 2, "warmup": 3})
    stages = recipes.load_stages("three-stage", {"epochs": 10}).values()
    assert [stage.optimisation.warmup for stage in stages] == [0.166667, 0.5, 2.5]


_BOMB = b"model:\n  a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + b"".join(
    b"  %c: &%c [%s]\n" % (98 + i, 98 + i, b", ".join([b"*%c" % (97 + i)] * 9)) for i in range(9)
)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"run: 3\nmodel: \xff", "not a text in UTF-8: byte 14 is 0xff"),
        (b"a: " + b"[" * 100_000, "nested too deeply"),
        (b"model: " + b"{a: " * 3000 + b"1" + b"}" * 3000, "nested too deeply"),
        (b"model: &a {x: *a}", "nested too deeply"),
        (_BOMB, "holds more than 10,000 values"),
        (b"run: {}\nrun: {}", "the key 'run' comes twice"),
        (b"model: {arguments: {depth: 1, depth: 2}}", "the key 'depth' comes twice"),
        (b"? [a]\n: 1", "unhashable key"),
        (b"seed: 2020-13-45", "not YAML"),
        (b"run: \0", "not YAML"),
        (b"task: classification\nmodel: {arguments: null}", "arguments.*None"),
        (b"task: classification\nmodel: null", "must map model to fields and values, got NoneType"),
        (b"task: classification\nepochs: 3", "'epochs' outside its section; write it below optim"),
        (b"model: vittt_tiny_patch16_224", "names no task"),
        (b"task: 3", "unknown task 3"),
        (b"task: classification\nmodel: {arguments: {a: 2020-01-01}}", "not JSON serializable"),
        (b"task: classification\nstages: {1: {}}", "1 cannot be the name of a stage"),
        (b"task: classification\nstages: {../up: {}}", "cannot be the name of a stage"),
        (b"task: classification\nstages: {..: {}}", "'..' cannot be the name of a stage"),
        (b"task: classification\nstages: {'': {}}", "'' cannot be the name of a stage"),
    ],
)
def test_hostile_recipes_are_explained(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        recipes.load_stages(str(path))


def test_a_recipe_may_use_an_anchor(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "task: classification\nstages:\n"
        "  a: &x {optimisation: {epochs: 30}}\n  b: {<<: *x, run: {seed: 1}}\n"
    )
    one, two = recipes.load_stages(str(path)).values()
    assert (one.optimisation.epochs, one.run.seed) == (30, 0)
    assert (two.optimisation.epochs, two.run.seed) == (30, 1)


def test_bad_recipes_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    with pytest.raises(FileNotFoundError, match=r"mine\.yaml"):
        recipes.load(str(path))
    with pytest.raises(ConfigError, match=r"unknown recipe 'digitz'; nearest: digits, "):
        recipes.load("digitz")
    path.write_text("task: classification\noptimisation: {epohcs: 3}")
    with pytest.raises(ConfigError, match=r"'optimisation.epohcs'; .*: optimisation.epochs"):
        recipes.load(str(path))
    path.write_text("task: classification\noptimisation: {epochs: many}")
    with pytest.raises(ConfigError, match=r"epochs.*many"):
        recipes.load(str(path))
    with pytest.raises(ConfigError, match=r"'duel' of vittt_nano.*; known are .*dual"):
        recipes.load("digits+duel")
    path.write_text("task: classification\nstages: {one: {optimisation: {epohcs: 3}}}")
    with pytest.raises(ConfigError, match=r"stage one.*'optimisation.epohcs'; .*: optimis"):
        recipes.load(str(path))
    path.write_text("task: classification\nstages: []")
    with pytest.raises(ConfigError, match="stages must map names to sections"):
        recipes.load(str(path))
    path.write_text("- epochs")
    with pytest.raises(ConfigError, match="must map"):
        recipes.load(str(path))
    path.write_text("epochs: [")
    with pytest.raises(ConfigError, match="not YAML"):
        recipes.load(str(path))


def test_steps_are_checked() -> None:
    steps = {"task": "classification", "epochs": 12, "schedule": "steps", "decay_at": [8, 11]}
    assert resolve(steps).optimisation.decay_at == [8.0, 11.0]
    for wrong, said in (
        ({"decay_at": []}, r"decay_at is \[\]; it must be at least one point, as schedule is"),
        ({"schedule": "cosine"}, "it must be empty, as schedule is 'cosine'"),
        ({"decay_at": [11, 8]}, "it must ascend"),
        ({"decay_at": [8, 13]}, r"at most epochs \(12\)"),
        ({"decay_at": [0]}, r"decay_at\[0\] is 0.* above 0"),
        ({"decay_at": ["late"]}, "decay_at"),
        ({"decay_at": 8}, "decay_at"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve({**steps, **wrong})
    with pytest.raises(TypeError, match="decay_at is 8; a list is needed"):
        _section("decay_at", 8)


def test_rates_that_no_schedule_uses_or_reaches() -> None:
    for wrong, said in (
        (
            {"power": 2.0},
            r"power is 2\.0; it must be 1\.0, as schedule is 'cosine'",
        ),
        ({"decay_rate": 0.5}, r"decay_rate is 0\.5; it must be 0\.1, as schedule is 'cosine'"),
        ({"power": 2.0, "schedule": "steps", "decay_at": [8]}, "power is .* schedule is 'steps'"),
        ({"learning_rate": 1e-7}, r"minimum_learning_rate is 1e-06; .* learning_rate \(1e-07\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve({"task": "classification", **wrong})
    resolve({"task": "classification", "learning_rate": 1e-7, "schedule": "steps", "decay_at": [8]})


def test_a_shorter_run_takes_its_steps_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "steps.yaml"
    optimisation = {"epochs": 12, "schedule": "steps", "decay_at": [8, 11], "warmup": 1}
    path.write_text(yaml.safe_dump({"task": "classification", "optimisation": optimisation}))
    assert recipes.load(str(path), {"epochs": 6}).optimisation.decay_at == [4.0, 5.5]
    assert "decay_at: 4, 5.5 instead of the recipe's 8, 11, as epochs are 6" in caplog.text
    given = recipes.load(str(path), {"epochs": 6, "decay_at": [2]}).optimisation
    assert (given.decay_at, given.warmup) == ([2.0], 0.5)


def test_paths_may_begin_at_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "book.txt").write_text("some words")
    config = recipes.load("digits", {"output": "~/run"})
    assert config.run.output == str(tmp_path / "run")
    assert weights_file("~/w.safetensors") == tmp_path / "w.safetensors"
    run = tmp_path / "run"
    run.mkdir()
    (run / "last.safetensors").touch()
    with pytest.raises(ConfigError, match=r"run is a folder; accepted: .*run.last\.safetensors$"):
        weights_file(str(run))
    assert weights_file("~no such user/w.safetensors") == Path("~no such user/w.safetensors")
    assert find_documents("~", "*.txt").root == tmp_path
