"""The arguments of `vision-ttt generate`."""

from dataclasses import dataclass
from pathlib import Path

import jsonargparse

from vision_ttt.cli.arguments.inference import DeviceFlag
from vision_ttt.cli.checks import check_input_file, check_readable
from vision_ttt.cli.parser import CommandParser, within
from vision_ttt.errors import UserError

MOST_TOKENS = 2**20

_EPILOG = """Examples:

  vision-ttt generate runs/text/last.safetensors --prompt "class "
  vision-ttt generate runs/text/best.safetensors --prompt "import " --temperature 0
  vision-ttt generate FOLDER --prompt "Once upon a time"

FOLDER is one that a causal model's save_pretrained of transformers wrote, with its tokenizer or
--tokenizer. The prompt begins a document; a text ends where the model ends the document, or after
--max-new-tokens. The same command writes the same text."""


@dataclass
class _Flags:
    """The prompt, and how tokens are drawn."""

    prompt: str = ""
    """the text to continue"""
    max_new_tokens: int = within(200, 1, MOST_TOKENS)
    """largest number of new tokens"""
    temperature: float = within(0.8, 0, 100)
    """below 1: more probable text; above 1: more varied text; 0: always the most probable token"""
    top_k: int = within(40, 0, 2**31 - 1)
    """number of most probable tokens to draw from; 0: all"""
    seed: int = within(0, 0, 2**63 - 1)
    """seed of the draws"""
    tokenizer: str | None = None
    """bytes, or the folder of a tokenizer of transformers; null: the checkpoint's own"""


def add_arguments(parser: CommandParser) -> None:
    """Declare the model, the prompt, and how tokens are drawn."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "checkpoint",
        type=str,
        help="path of a language model's last.safetensors, or a folder of transformers",
    )
    parser.add_fields(_Flags)
    parser.add_fields(DeviceFlag)


def check(arguments: jsonargparse.Namespace) -> None:
    """Raise UserError unless the checkpoint is a file, or a folder of transformers."""
    check_readable("the checkpoint", arguments.checkpoint)
    folder = Path(arguments.checkpoint)
    if not folder.is_dir():
        check_input_file("the checkpoint", arguments.checkpoint)
    elif not (folder / "config.json").is_file():
        raise UserError(
            f"the folder {folder} holds no config.json, so it is none of transformers; name a"
            " .safetensors file, such as last.safetensors of a run"
        )
