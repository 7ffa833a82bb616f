"""Commands take the names of packaged weights where they take checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vision_ttt.cli.arguments import app, explain, export
from vision_ttt.cli.main import main
from vision_ttt.cli.parser import CommandParser
from vision_ttt.data import Digits
from vision_ttt.engine.checkpoint import read_metadata
from vision_ttt.pretrained import weights_path
from vision_ttt.recipes import resolve

Said = pytest.CaptureFixture[str]
VITTT, VIT3 = "vittt_nano_patch4_32.digits", "vit3_nano_patch4_32.digits"


def test_models_lists_them(capsys: Said) -> None:
    assert main(["models", "v*_nano*", "--json"]) == 0
    listed = {row["name"]: row["pretrained"] for row in json.loads(capsys.readouterr().out)}
    assert listed["vittt_nano_patch4_32"] == [VITTT]
    assert listed["vim_nano_patch4_32"] == []
    assert main(["models", "vit3_nano*"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if " vit3_nano" in line]
    assert [" digits, fashion_mnist " in row for row in rows] == [True, False]


def test_eval_gives_the_figures_of_the_card(capsys: Said) -> None:
    assert main(["eval", VIT3, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    metrics = read_metadata(Path(weights_path(VIT3))).metrics
    assert told["accuracy"] == metrics["test_accuracy"]
    assert told["loss"] == pytest.approx(metrics["test_loss"], rel=1e-3)


def test_predict_reads_a_digit(tmp_path: Path, capsys: Said) -> None:
    image, digit = Digits("test")[0]
    image.save(tmp_path / "a.png")
    argv = ["predict", str(tmp_path / "a.png"), "--checkpoint", VITTT, "--topk", "1", "--json"]
    assert main(argv) == 0
    assert f'"class": "{digit}"' in capsys.readouterr().out


def test_training_starts_from_them(
    tiny_fields: Callable[..., dict], tmp_path: Path, capsys: Said, no_report: None
) -> None:
    fields = tiny_fields(arguments={}, image_size=8, epochs=1, initial_weights=VITTT)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(resolve(fields).as_dict()))
    assert main(["train", str(recipe)]) == 0
    said = capsys.readouterr().err
    assert f"starting from {weights_path(VITTT)}, weights of vittt_nano_patch4_32: " in said
    assert "1 of them interpolated (pos_embed), 2 start at zero (head.weight, head.bias)" in said

    assert main(["train", str(recipe), "--overwrite", "--model", VITTT]) == 2
    assert "names weights; the model is vittt_nano_patch4_32" in capsys.readouterr().err


def test_other_commands_find_their_file(tmp_path: Path) -> None:
    parser = CommandParser("vision-ttt explain", "look inside")
    explain.add_arguments(parser)
    argv = ["norms", VITTT, "sample:digit-0", "--output", str(tmp_path / "out")]
    arguments = explain.parse(parser, argv)
    explain.check(arguments)
    assert explain.split_models_and_images(arguments.given) == (
        [weights_path(VITTT)],
        ["sample:digit-0"],
    )
    for command, argv, name, found in (
        (export, [VITTT, str(tmp_path / "a.pt2")], "checkpoint", weights_path(VITTT)),
        (app, [VITTT, "resnet18"], "models", [weights_path(VITTT), "resnet18"]),
    ):
        parser = CommandParser("vision-ttt", "a command")
        command.add_arguments(parser)
        arguments = parser.parse_command(argv)
        command.check(arguments)
        assert arguments[name] == found
