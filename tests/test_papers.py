"""The page of the papers' tables and figures: each of its commands is one."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from studies.main import COMMANDS as STUDIES
from vision_ttt.cli.main import COMMANDS
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError
from vision_ttt.recipes import available

PAGE = (Path(__file__).parents[1] / "docs/papers.md").read_text(encoding="utf-8")
LINES = re.findall(r"`((?:vision-ttt|python -m studies) [^`]+)`", PAGE)
WORDS = [words for line in LINES if "…" not in line for words in [shlex.split(line)]]


def parsed(words):
    """The arguments of a command; those of a training resolve its recipe."""
    commands, (name, *argv) = COMMANDS, words[1:]
    if words[0] == "python":
        commands, (name, *argv) = STUDIES, words[3:]
    command = commands[name]
    package = command.module.rpartition(".")[0]
    declared = importlib.import_module(f"{package}.arguments.{name.replace('-', '_')}")
    parser = CommandParser(name, command.summary)
    declared.add_arguments(parser)
    arguments = getattr(declared, "parse", CommandParser.parse_command)(parser, argv)
    if name == "train":
        declared.check(arguments)
    return arguments


def test_every_command_parses():
    assert len(WORDS) > 70
    for words in WORDS:
        try:
            parsed(words)
        except (UserError, KeyError) as error:
            pytest.fail(f"{shlex.join(words)}: {error}")
    with pytest.raises(UserError, match="unknown variant"):
        parsed(["vision-ttt", "train", "imagenet-vim-tiny+dual"])


def test_every_ablation_is_named():
    from vision_ttt.models import mamba_reg_ablations, vittt_ablations
    from vision_ttt.tasks.language import ablations

    named = set(re.findall(r"\+([a-z0-9_]+)", PAGE))
    for family in (vittt_ablations, mamba_reg_ablations, ablations):
        assert named >= family.ABLATIONS.keys()


def test_every_published_recipe_has_a_row():
    published = {name for name in available() if name.startswith(("imagenet-", "coco-", "ade20k-"))}
    trained = {words[2].partition("+")[0] for words in WORDS if words[1] == "train"}
    # Fine-tuning that no paper has.
    others = {"imagenet-384", "coco-vittt-frozen", "coco-resnet50", "ade20k-mambar-tiny"}
    assert published - trained == others
