"""Distillation: what the teacher sees and computes, the losses, the run, and its checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from interrupted_runs import run_through, train_until
from vision_ttt.cli.main import main
from vision_ttt.engine import CheckpointError, ConfigError, train
from vision_ttt.engine.run_directory import checkpoints
from vision_ttt.engine.state import read_state
from vision_ttt.engine.task import Moment
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model
from vision_ttt.tasks.distill import DistillSection
from vision_ttt.tasks.distill.model import distances
from vision_ttt.tasks.distill.teacher import Teacher

Fields = Callable[..., dict]
SLOW = pytest.mark.slow  # tests of other tasks, or other cases, run the same code
VIT = {"img_size": 24, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 1}
TEACHERS = {"vit_tiny_patch16_224": VIT, "mobilenetv3_small_050": {}}


def build_teacher(name: str, num_classes: int) -> torch.nn.Module:
    torch.manual_seed(1)
    return timm.create_model(name, num_classes=num_classes, **TEACHERS[name]).eval()


@pytest.fixture
def fields(tiny_fields: Fields, tmp_path: Path) -> Fields:
    """Fields of a run whose teacher is a small ViT on images of 24 × 24 pixels, of 3 × 3 tokens."""

    def make(teacher: str = "vit_tiny_patch16_224", **overrides: object) -> dict:
        path = tmp_path / f"{teacher}.safetensors"
        if teacher in TEACHERS and not path.exists():
            save_file(build_teacher(teacher, 2).state_dict(), path)
        named = {"teacher": teacher, "teacher_weights": str(path), "teacher_size": 24}
        named["teacher_arguments"] = TEACHERS.get(teacher, {})
        common = {"task": "distill", "image_size": 16, "drop_path": 0.0}
        return tiny_fields(**{**common, **named, **overrides})

    return make


def opened(fields: dict) -> tuple:
    config = resolve(fields)
    task = config.task.open(config)
    torch.manual_seed(0)
    model = task.build_model(config.model.name, task.model_arguments()).eval()
    task.prepare(model)
    return task, model


def seen_by_teacher(task: object, images: torch.Tensor) -> torch.Tensor:
    """The images as the teacher's own description has them."""
    mean, std, own_mean, own_std = (
        torch.tensor(each).view(-1, 1, 1)
        for each in (task.input["mean"], task.input["std"], (0.5,) * 3, (0.5,) * 3)
    )
    levels = (images * std + mean - own_mean) / own_std
    return F.interpolate(levels, (24, 24), mode="bilinear", antialias=True)


def batch_of(count: int = 3) -> dict:
    torch.manual_seed(2)
    targets = torch.arange(count) % 2
    return {"images": torch.randn(count, 3, 16, 16), "targets": targets, "indices": targets}


def test_tokens_are_those_of_the_teachers_last_map(fields: Fields) -> None:
    task, model = opened(fields())
    batch = batch_of()
    vit = build_teacher("vit_tiny_patch16_224", 2)
    assert vit.pretrained_cfg["mean"] == (0.5,) * 3 != tuple(task.input["mean"])
    tokens = vit.forward_features(seen_by_teacher(task, batch["images"]))[:, 1:]
    wanted = tokens.mT.unflatten(2, (3, 3))
    wanted = F.interpolate(wanted, (4, 4), mode="bilinear", antialias=True).flatten(2).mT
    found = model.projection[0](model.backbone.forward_features(batch["images"]))
    for kind in ("smooth_l1", "cosine"):
        each = distances(found.mT.unflatten(2, (4, 4)), wanted.mT.unflatten(2, (4, 4)), kind)
        if kind == "cosine":
            by_hand = 1 - (F.normalize(found, dim=-1) * F.normalize(wanted, dim=-1)).sum(-1)
        else:
            a, b = (
                (x - x.mean(-1, True)) / (x.var(-1, False, True) + 1e-5).sqrt()
                for x in (found, wanted)
            )
            gap = (a - b).abs()
            by_hand = torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean(-1)
        torch.testing.assert_close(each, by_hand.mean(1))
    loss, count = task.loss(model, batch, Moment(0.0, None))
    assert count == 3
    torch.testing.assert_close(
        loss,
        distances(found.mT.unflatten(2, (4, 4)), tokens.mT.unflatten(2, (3, 3)), "smooth_l1").sum(),
    )
    loss.backward()
    learning = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in learning)
    assert all(p.grad is None for p in task.teacher.model.parameters())


def test_logits_are_compared_as_probabilities(fields: Fields) -> None:
    options = {"match": "logits", "temperature": 2.0, "label_weight": 0.25}
    task, model = opened(fields("mobilenetv3_small_050", **options))
    batch = batch_of()
    network = build_teacher("mobilenetv3_small_050", 2)
    stats = {key: (network.pretrained_cfg[key]) for key in ("mean", "std")}
    assert {key: tuple(task.input[key]) for key in stats} == stats
    seen = F.interpolate(batch["images"], (24, 24), mode="bilinear", antialias=True)
    teacher, student = network(seen) / 2, model(batch["images"])
    p = teacher.softmax(-1)
    entropy = (p * (p.log() - (student / 2).log_softmax(-1))).sum(-1)
    labels = F.cross_entropy(student, batch["targets"], reduction="none")
    loss, _ = task.loss(model, batch, Moment(0.0, None))
    torch.testing.assert_close(loss, (0.75 * 4 * entropy + 0.25 * labels).sum())


@pytest.mark.parametrize(
    "match", ["tokens", pytest.param("layers", marks=SLOW), "pooled", "logits"]
)
def test_it_learns_and_an_empty_batch_is_of_the_graph(fields: Fields, match: str) -> None:
    config = resolve(fields(match=match, learning_rate=1e-2))
    result = train(config)
    losses = [row["test_loss"] for row in result.metrics["history"]]
    assert losses[-1] < losses[0]
    empty = {name: value[:0] for name, value in batch_of().items()}
    model = result.model.train()
    loss, count = result.task.loss(model, empty, Moment(0.0, None))
    assert (loss.item(), count) == (0.0, 0)
    loss.backward()
    # Under DDP every parameter that learns must have a gradient.
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_the_teacher_stays_as_it_is(fields: Fields) -> None:
    result = train(
        resolve(fields("mobilenetv3_small_050", match="pooled", feature_loss="cosine", epochs=1))
    )
    own = build_teacher("mobilenetv3_small_050", 2).state_dict()
    for name, value in result.task.teacher.model.state_dict().items():
        assert torch.equal(value, own[name]), name  # the running statistics, too


@pytest.mark.parametrize(("size", "seen"), [(48, (48, 48)), ([48, 32], (48, 32))])
def test_a_teacher_sees_images_of_the_size_that_it_is_built_for(size: object, seen: tuple) -> None:
    name = "vittt_nano_patch4_32.digits"
    teacher = Teacher(DistillSection(teacher=name, teacher_arguments={"img_size": size}), 10)
    assert teacher.input["input_size"] == (3, *seen)
    (tokens,) = teacher(torch.zeros(1, 3, 32, 32), teacher.input)
    assert tokens.shape[2:] == (seen[0] // 4, seen[1] // 4)


def test_weights_of_another_model_than_the_teachers(fields: Fields) -> None:
    of_a_vit = fields()["teacher_weights"]  # one of class tokens: 10 positions
    section = DistillSection(teacher="vittt_nano_patch4_32", teacher_weights=of_a_vit)
    with pytest.raises(ConfigError, match="teacher_weights: pos_embed has 10 tokens, which is not"):
        Teacher(section, 2)


def test_the_teachers_weights_lie_below_the_home_folder(
    fields: Fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = fields()
    monkeypatch.setenv("HOME", str(tmp_path))
    config = resolve({**given, "teacher_weights": f"~/{Path(given['teacher_weights']).name}"})
    assert Teacher(config.task, 2).widths == [48]


def test_a_students_checkpoint_needs_no_teacher(
    fields: Fields, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given = fields(match="logits", epochs=1)
    train(resolve(given))
    weights = tmp_path / "run" / "last.safetensors"
    assert main(["eval", str(weights), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"loss", "accuracy", "agreement"} <= set(told)
    Path(given["teacher_weights"]).unlink()
    model, _ = load_model(weights)  # a classifier
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 2)
    picture = next((tmp_path / "images").rglob("*.png"))
    assert main(["predict", str(picture), "--checkpoint", str(weights)]) == 0
    assert main(["eval", str(weights)]) == 2
    assert "vit_tiny_patch16_224.safetensors" in capsys.readouterr().err

    features = fields(match="tokens", epochs=1, output=str(tmp_path / "features"))
    train(resolve(features))
    weights = tmp_path / "features" / "last.safetensors"
    with pytest.raises(CheckpointError, match=r"holds a distilled student .* not a classifier"):
        load_model(weights)
    assert main(["predict", str(picture), "--checkpoint", str(weights)]) == 2
    assert "it predicts nothing" in capsys.readouterr().err
    start = {"task": "classification", "initial_weights": str(weights), "frozen_layers": "all"}
    kept = {key: value for key, value in features.items() if not key.startswith("teacher")}
    del kept["match"]
    own = {"teacher": kept["model"], "teacher_weights": str(weights)}
    own |= {"teacher_arguments": {**kept["arguments"], "img_size": 16}}
    assert Teacher(DistillSection(**own, match="pooled"), 2).widths == [32]
    with pytest.raises(ConfigError, match="is of a pre-training, which trains no head; match is"):
        Teacher(DistillSection(**own, match="logits"), 2)
    result = train(resolve({**kept, **start, "output": str(tmp_path / "classifier")}))
    own = load_model(weights, task="distill")[0].backbone.state_dict()
    assert torch.equal(result.model.norm.weight, own["norm.weight"])
    assert torch.equal(result.model.pos_embed, own["pos_embed"])
    told = result.task.start_from(weights, result.model, kept["model"], kept["arguments"])
    assert "Note: the model trained is" not in told  # it is the same one


def test_a_linear_vit_learns_the_layers_of_its_vit(
    fields: Fields, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vit = {**VIT, "img_size": 16, "depth": 2}
    given = fields(teacher_arguments=vit, teacher_size=16, match="layers", epochs=1)
    own = timm.create_model("vit_tiny_patch16_224", num_classes=2, **vit).state_dict()
    save_file(own, given["teacher_weights"])
    sizes = {key: value for key, value in vit.items() if key != "img_size"}
    given |= {"model": "linear_vit", "arguments": {"base": "vit_tiny_patch16_224", **sizes}}
    given["initial_weights"] = given["teacher_weights"]
    result = train(resolve({**given, "frozen_layers": 0}))
    assert "the teacher is" not in caplog.text
    assert not list(result.model.projection.parameters())  # one width: layers meet as they are
    assert torch.equal(result.model.backbone.head.weight, own["head.weight"])
    given["arguments"]["base"] = "deit_tiny_patch16_224.fb_in1k"
    resolve(given).task.open(resolve(given))
    told = (
        "the teacher is vit_tiny_patch16_224, but the student is made from deit_tiny_patch16_224.fb"
    )
    assert told in caplog.text
    given["arguments"]["base"] = "vit_tiny_patch16_224"
    # The head that the ViT had is there for what comes next.
    start = {"initial_weights": str(tmp_path / "run" / "last.safetensors"), "epochs": 1}
    start |= {"task": "classification", "frozen_layers": "all", "learning_rate": 1e-6}
    start |= {"output": str(tmp_path / "next"), "warmup": 0, "weight_decay": 0.0}
    kept = {key: value for key, value in given.items() if not key.startswith(("teacher", "match"))}
    head = train(resolve({**kept, **start})).model.head.weight
    torch.testing.assert_close(head, own["head.weight"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("match", ["tokens", pytest.param("logits", marks=SLOW)])
def test_killed_and_resumed_it_is_the_same_run(fields: Fields, tmp_path: Path, match: str) -> None:
    whole = train(resolve(fields(match=match, output=str(tmp_path / "whole"))))
    config = resolve(fields(match=match, output=str(tmp_path / "parts"), checkpoint_every=3))
    train_until(config, 4)
    resumed = train(config, resume=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])
    assert whole.evaluation == resumed.evaluation


@SLOW
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
        ({"teacher": "vit_tiny_patch16"}, "unknown model 'vit_tiny_patch16'; nearest: vit_tiny"),
        ({"teacher": "vit_tini", "teacher_weights": None}, "unknown teacher 'vit_tini'; nearest:"),
        ({"teacher_arguments": {}}, "vit_tiny_patch16_224.safetensors does not fit"),
        ({"teacher_size": 32}, "teacher vit_tiny_patch16_224, match 'tokens': .*32"),
        ({"match": "layers", "arguments": {"depth": 2}}, "2 features and the teacher 1"),
        ({"arguments": {"patch_drop_rate": 0.5}}, "patch_drop_rate is 0.5; with match 'tokens' it"),
        ({"match": "layers", "arguments": {"patch_drop_rate": 0.1}}, "rate is 0.1; with match 'la"),
        (
            {"match": "pooled", "teacher_arguments": {**VIT, "global_pool": ""}},
            r"it returns \[1, 10, 48\] for an image, and one vector is needed; set its global_pool",
        ),
        ({"model": "resnet18", "arguments": {}}, "resnet18: ResNet is not a plain backbone"),
        (
            {"model": "dit3_nano_patch4_32", "match": "logits", "drop_path": None},
            "dit3_nano_patch4_32 denoises and classifies nothing; set task to diffusion",
        ),
        (
            {"teacher": "vittt_nano_patch4_32.digits", "teacher_weights": None, "match": "logits",
             "teacher_arguments": {}, "teacher_size": None},
            "teacher vittt_nano_patch4_32.digits has 10 classes and the dataset 2",
        ),
    ],
)  # fmt: skip
def test_teachers_that_do_not_fit(fields: Fields, overrides: dict, told: str) -> None:
    arguments = {"depth": 1, "embed_dim": 32, "num_heads": 1, **overrides.pop("arguments", {})}
    if "model" in overrides:
        arguments = {}
    config = resolve(fields(**overrides, arguments=arguments))
    with pytest.raises(ConfigError, match=told):
        train(config)
    assert not Path(config.run.output).exists()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"teacher": None}, "teacher is null; it must name a model"),
        ({"match": "attention"}, "match is 'attention'; it must be tokens or layers or pooled"),
        (
            {"temperature": 2.0},
            "temperature is 2.0; it must be 1.0, as match is 'tokens', which does not use it",
        ),
        ({"label_weight": 0.5}, "label_weight is 0.5; it must be 0.0, as match is 'tokens'"),
        ({"match": "logits", "feature_loss": "cosine"}, "feature_loss is 'cosine'; it must be"),
        ({"match": "logits", "label_weight": 1.0}, "label_weight is 1.0; it must be from 0 to"),
    ],
)
def test_fields_that_do_not_fit(fields: Fields, overrides: dict, told: str) -> None:
    given = fields()
    with pytest.raises(ConfigError, match=told):
        resolve({**given, **overrides})
