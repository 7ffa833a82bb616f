"""train, eval and predict, from the command line's end."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vision_ttt.cli.arguments.train import COMMON, DEFAULT_TASK
from vision_ttt.cli.main import main
from vision_ttt.engine import train
from vision_ttt.engine.checkpoint import read_weights, save_weights
from vision_ttt.errors import Interrupted
from vision_ttt.recipes import resolve
from vision_ttt.recipes.names import short_names
from vision_ttt.tasks import find, load_model

Said = pytest.CaptureFixture[str]


@pytest.fixture
def recipe(tiny_fields: Callable[..., dict], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(resolve(tiny_fields(epochs=1)).as_dict()))
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def image_folder(image_folder: Path, shared: Path) -> Path:
    """The images anew at one place, which a checkpoint of an earlier test names."""
    shutil.rmtree(shared / "images", ignore_errors=True)
    return Path(shutil.move(image_folder, shared / "images"))


@pytest.fixture
def checkpoint(tiny_fields: Callable[..., dict], shared: Path, tmp_path: Path) -> str:
    """The weights of a run, which is trained once, in a folder of their own."""
    options = {"epochs": 8, "horizontal_flip": 0.0, "crop_scale": 0.5}
    if not (shared / "run").exists():
        train(resolve(tiny_fields(**options, output=str(shared / "run"))))
    return str(shutil.copytree(shared / "run", tmp_path / "run") / "last.safetensors")


# Not of the table, to which other tests add.
@pytest.mark.parametrize("task", ["classification", "diffusion"])
def test_train_help_explains_every_field(task: str, capsys: Said) -> None:
    asked = [] if task == DEFAULT_TASK else ["--task", task]
    with pytest.raises(SystemExit) as ended:
        main(["train", *asked, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    fields = short_names(find(task))
    assert len(fields) > 50
    assert all(f"--{name.replace('_', '-')} " in said for name in fields)
    assert f"\nthe task, {task}:" in said
    assert "_" not in "".join(re.findall(r"(?<!\S)--[\w-]+", said))
    assert "lambda" not in said
    # What is set often comes first, in a group of its own; the examples come after the fields.
    places = [said.index(f"\n  --{name.replace('_', '-')} ") for name in COMMON]
    assert max(places) < said.index("\n  --drop-path ")
    assert said.index("\n  vision-ttt train digits --epochs 5") > said.index("--wandb-project")
    assert "imagenet-vittt-tiny" in said
    assert "default: 0.05" in said
    assert "Exit codes: 0 finished" in said


def test_train_help_shows_the_values_of_the_recipe(tmp_path: Path, capsys: Said) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: digits\noptimisation: {epochs: 77}\nstages: {a: {}, b: {}}\n")
    for asked in (str(recipe), "digits"):
        with pytest.raises(SystemExit):
            main(["train", asked, "--help"])
    mine, packaged = capsys.readouterr().out.split("usage:")[1:]
    assert "The defaults are the recipe's. Its stages (a, b) set others.\n" in mine
    assert "default: 77)" in mine
    assert "default: runs/mine)" in mine
    assert "The defaults are the recipe's.\n" in packaged
    assert "default: 12)" in packaged
    assert "default: runs/digits)" in packaged


def test_train_overrides_the_recipe_wherever_the_flag_stands(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    monkeypatch.setattr(
        "vision_ttt.cli.train._train_stages", lambda stages, *_: trained.append(stages[""])
    )
    flags = (
        [str(recipe), "--seed", "5"],
        ["--seed", "5", str(recipe)],
        [str(recipe), "--run.seed=5", "--model.arguments.depth", "2"],
    )
    for number, argv in enumerate(flags):
        assert main(["train", *argv, "--output", f"out{number}"]) == 0
        config = trained.pop()
        assert (config.run.seed, config.run.output) == (5, f"out{number}")
        assert config.optimisation.epochs == 1
        assert config.model.arguments["depth"] == 1 + (number == 2)


def test_train_twice_resume_overwrite(
    recipe: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", str(recipe)]) == 0
    said = capsys.readouterr()
    for row in ("best test accuracy", "inner loss", "images per second", "peak memory", "weights"):
        assert row in said.out
    assert "epoch 1/1" in said.err
    monkeypatch.setattr("vision_ttt.cli.train.report", lambda result: None)  # takes seconds
    assert main(["train", str(recipe)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", str(recipe), "--resume"]) == 0
    assert "resuming from " in capsys.readouterr().err
    assert main(["train", "--resume", str(recipe)]) == 0
    assert main(["train", str(recipe), "--resume", "--epochs", "2"]) == 2
    told = capsys.readouterr().err
    assert "optimisation.epochs 1 -> 2. Give the former values, or begin another run by" in told
    assert main(["train", str(recipe), "--overwrite", "--arguments.depth", "2"]) == 0


def test_train_in_stages(
    tiny_fields: Callable[..., dict],
    tmp_path: Path,
    capsys: Said,
    no_report: None,
) -> None:
    """Each stage starts from the weights of the one before, at its own size and rate."""
    path, output = tmp_path / "staged.yaml", tmp_path / "staged"
    stages = {
        "small": {"data": {"image_size": 24}},
        "large": {"data": {"image_size": 32}, "optimisation": {"learning_rate": 1e-6}},
    }
    recipe = resolve(tiny_fields(epochs=1, warmup=0, output=str(output))).as_dict()
    path.write_text(json.dumps({**recipe, "stages": stages}))
    assert main(["train", str(path)]) == 0
    said = capsys.readouterr().err
    assert "stage small (1 of 2)" in said
    assert "stage large (2 of 2)" in said
    small, large = (load_model(output / name / "last.safetensors")[0] for name in stages)
    assert (small.pos_embed.shape[1], large.pos_embed.shape[1]) == (36, 64)
    for name, weight in small.state_dict().items():
        if name != "pos_embed":
            torch.testing.assert_close(large.state_dict()[name], weight, rtol=0, atol=1e-5)
    # A stage that was killed before its report is evaluated again.
    assert main(["train", str(path), "--resume", "auto"]) == 0
    assert capsys.readouterr().err.count("resuming from") == 2
    # What is finished is left as it is; what is not goes on.
    for name in stages:
        (output / name / "report.html").touch()
    for file in (output / "large" / "checkpoints").iterdir():
        file.unlink()
    (output / "large" / "metrics.json").unlink()
    for resume in ("auto", "true"):
        assert main(["train", str(path), "--resume", resume]) == 0
        said = capsys.readouterr().err
        assert "stage small is finished" in said
        assert ("epoch 1/1" in said) == (resume == "auto")
    # What is finished is the stage of another run.
    assert main(["train", str(path), "--resume", "auto", "--seed", "7"]) == 2
    assert "small cannot be resumed with another config: run.seed" in capsys.readouterr().err


def test_a_stopped_stage_says_how_the_recipe_goes_on(
    tiny_fields: Callable[..., dict],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Said,
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise Interrupted("stopped. Resume with: COMMAND")

    monkeypatch.setattr("vision_ttt.cli.train.train", stopped)
    path = tmp_path / "staged.yaml"
    recipe = resolve(tiny_fields(epochs=1, output=str(tmp_path / "run"))).as_dict()
    for stages, told in ({"only": {}}, "COMMAND\n"), ({"a": {}, "b": {}}, "--resume auto\n"):
        path.write_text(json.dumps({**recipe, "stages": stages}))
        assert main(["train", str(path)]) == 130
        assert capsys.readouterr().err.endswith(told)


def test_exit_codes(recipe: Path, image_folder: Path, capsys: Said) -> None:
    assert main(["train", str(recipe), "--learning_rate", "1e30", "--clip_norm", "0"]) == 3
    said = capsys.readouterr().err
    assert "is not finite" in said
    assert "non-finite/update-" in said
    (image_folder / "train" / "dark" / "0.png").write_bytes(b"")
    assert main(["train", str(recipe), "--overwrite"]) == 2
    assert "dark/0.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["digtis"], "nearest: digits, digits-distill, digits-dino"),
        (["digits", "--epohcs", "1"], "nearest: --epochs"),
        (["digits", "--optimisation.epohcs", "1"], "nearest: --epochs"),
        (["digits", "--data.epochs", "1"], "unknown flag --data.epochs; nearest: --epochs"),
        (["digits", "--epochs", "1", "--updates", "4"], "epochs 1, updates 4: only one of"),
        (["digits", "--task", "difusion"], "unknown task 'difusion'; nearest: diffusion"),
        (["digits", "--epochs", "0"], "epochs is 0; it must be at least 1"),
        (["digits", "--decay-at", "3"], "--decay-at is '3'; it must be a list in brackets"),
        (["digits", "--dataset", "no/such"], "no/such"),
        (["none.yaml"], "none.yaml"),
        ([], "recipe"),
    ],
)
def test_train_with_wrong_arguments(argv: list[str], told: str, capsys: Said) -> None:
    assert main(["train", *argv]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1


def test_eval(checkpoint: str, image_folder: Path, capsys: Said) -> None:
    assert main(["eval", checkpoint, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["images"], report["accuracy"]) == (8, 1.0)
    assert [row["images"] for row in report["classes"]] == [4, 4]
    assert main(["eval", checkpoint, "--json", "--dtype", "bfloat16"]) == 0
    rounded = json.loads(capsys.readouterr().out)
    assert rounded["accuracy"] == 1.0
    assert 0 < abs(rounded["loss"] - report["loss"]) < 0.05
    assert main(["eval", checkpoint, "--split", "all"]) == 0
    said = capsys.readouterr().out
    assert "dark" in said
    assert "24" in said
    assert "top-5" not in said  # of two classes
    assert main(["eval", checkpoint, "--dataset", str(image_folder / "val"), "--split=all"]) == 0
    assert main(["eval", checkpoint, "--dataset", "digits"]) == 2
    assert "2 classes and the dataset 10" in capsys.readouterr().err


def test_eval_of_a_folder_that_has_grown(
    tiny_fields: Callable[..., dict], image_folder: Path, capsys: Said
) -> None:
    """Other images would be held out for test now, and the model was trained on some of them."""
    folder = image_folder / "train"
    result = train(resolve(tiny_fields(dataset=str(folder), epochs=1)))
    command = ["eval", str(result.run_dir / "last.safetensors")]
    assert main(command) == 0
    shutil.copy(folder / "dark" / "0.png", folder / "dark" / "00.png")
    capsys.readouterr()
    for spelled in ([], ["--dataset", str(folder)], ["--dataset", f"{folder}/../train/"]):
        assert main([*command, *spelled]) == 2
        assert "other images of" in capsys.readouterr().err
    assert main([*command, "--split", "all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 17


def test_eval_of_a_folder_that_was_moved(
    tiny_fields: Callable[..., dict], image_folder: Path, tmp_path: Path, capsys: Said
) -> None:
    """It is divided by the run's seed, though another dataset's would not be."""
    folder = image_folder / "train"
    result = train(resolve(tiny_fields(dataset=str(folder), split_seed=3, epochs=1)))
    command = ["eval", str(result.run_dir / "last.safetensors"), "--json"]
    assert main(command) == 0
    expected = json.loads(capsys.readouterr().out)
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert main([*command, "--dataset", str(moved)]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["accuracy"] == expected["accuracy"]
    assert "drawn by" not in said.err
    shutil.copy(moved / "dark" / "0.png", moved / "dark" / "00.png")
    assert main([*command, "--dataset", str(moved)]) == 0
    assert "drawn by test_fraction 0.2 and split_seed 0" in capsys.readouterr().err


def test_eval_of_a_self_distilled_model(checkpoint: str, tmp_path: Path, capsys: Said) -> None:
    """What its training needed (a moving average) evaluation does not."""
    weights, metadata = read_weights(Path(checkpoint))
    task = {**metadata.task, "self_distillation": 1.0, "mixup": 0.8}
    distilled = tmp_path / "distilled.safetensors"
    save_weights(distilled, weights, dataclasses.replace(metadata, task=task))
    assert main(["eval", str(distilled), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == 1.0


def test_eval_skips_damaged_images_only_when_told(
    checkpoint: str, image_folder: Path, capsys: Said
) -> None:
    (image_folder / "val" / "dark" / "2.png").write_bytes(b"\x89PNG")
    assert main(["eval", checkpoint]) == 2
    assert "dark/2.png" in capsys.readouterr().err
    assert main(["eval", checkpoint, "--skip-bad", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["images"] == 7
    assert [Path(name).name for name in report["skipped"]] == ["2.png"]


def test_predict_tables_and_json(checkpoint: str, image_folder: Path, capsys: Said) -> None:
    image = str(image_folder / "val" / "dark" / "0.png")
    assert main(["predict", image, "--checkpoint", checkpoint]) == 0
    assert "dark" in capsys.readouterr().out
    assert main(["predict", str(image_folder / "val"), "--checkpoint", checkpoint, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["predictions"]) == 8
    for prediction in answer["predictions"]:
        assert prediction["top"][0]["class"] == Path(prediction["image"]).parent.name
        assert sum(entry["probability"] for entry in prediction["top"]) == pytest.approx(1)
    argv = ["predict", image, "--checkpoint", checkpoint, "--json", "--topk", "1"]
    assert main([*argv, "--dtype", "bfloat16"]) == 0
    top = json.loads(capsys.readouterr().out)["predictions"][0]["top"][0]
    assert top["class"] == "dark"
    exact = answer["predictions"][0]["top"][0]["probability"]
    assert 0 < abs(top["probability"] - exact) < 0.02
    assert main(argv) == 0
    assert len(json.loads(capsys.readouterr().out)["predictions"][0]["top"]) == 1


def test_predict_damaged_images(checkpoint: str, image_folder: Path, capsys: Said) -> None:
    bad = image_folder / "val" / "dark" / "1.png"
    bad.write_text("nothing")
    folder = str(bad.parent)
    assert main(["predict", folder, "--checkpoint", checkpoint, "--json"]) == 2
    said = capsys.readouterr()
    assert "dark/1.png" in said.err
    assert not said.out
    assert main(["predict", folder, "--checkpoint", checkpoint, "--json", "--skip-bad"]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert len(answer["predictions"]) == 3
    assert answer["skipped"] == [str(bad)]
    assert "dark/1.png" in said.err
    assert "1 of 4 images skipped" in said.err
    assert main(["predict", str(bad), "--checkpoint", checkpoint, "--skip-bad"]) == 2
    assert "none of the 1 images" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_bad_checkpoints_are_one_line(
    command: str, image_folder: Path, tmp_path: Path, capsys: Said
) -> None:
    missing, damaged = tmp_path / "missing.safetensors", tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"\x10\0\0\0\0\0\0\0{")
    for path in (missing, damaged):
        argv = [str(path)] if command == "eval" else [str(image_folder), "--checkpoint", str(path)]
        assert main([command, *argv]) == 2
        said = capsys.readouterr().err
        assert path.name in said
        assert len(said.splitlines()) == 1
