"""The arguments of `vision-ttt generate`."""

from pathlib import Path

import jsonargparse

from vision_ttt.cli.checks import check_input_file, check_range, check_readable
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError

MOST_TOKENS = 2**20

_EPILOG = """Examples:

  vision-ttt generate runs/text/last.safetensors --prompt "class "
  vision-ttt generate runs/text/best.safetensors --prompt "import " --temperature 0
  vision-ttt generate FOLDER --prompt "Once upon a time"

FOLDER is one that a causal model's save_pretrained of transformers wrote, with its tokenizer or
--tokenizer. The prompt begins a document; a text ends where the model ends the document, or after
--max-new-tokens. The same command writes the same text."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the model, the prompt, and how tokens are drawn."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "checkpoint",
        type=str,
        help="path of a language model's last.safetensors, or a folder of transformers",
    )
    parser.add_argument("--prompt", type=str, default="", help="the text to continue")
    parser.add_argument(
        "--max_new_tokens", type=int, default=200, help="largest number of new tokens"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="below 1: more probable text; above 1: more varied text; 0: always the most probable"
        " token",
    )
    parser.add_argument(
        "--top_k", type=int, default=40, help="number of most probable tokens to draw from; 0: all"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument(
        "--tokenizer",
        type=str | None,
        default=None,
        help="bytes, or the folder of a tokenizer of transformers; null: the checkpoint's own",
    )


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse numbers out of range and a checkpoint that is none."""
    check_range(
        arguments,
        max_new_tokens=(1, MOST_TOKENS),
        temperature=(0, 100),
        top_k=(0, 2**31 - 1),
        seed=(0, 2**63 - 1),
    )
    check_readable("the checkpoint", arguments.checkpoint)
    folder = Path(arguments.checkpoint)
    if not folder.is_dir():
        check_input_file("the checkpoint", arguments.checkpoint)
    elif not (folder / "config.json").is_file():
        raise UserError(
            f"the folder {folder} holds no config.json, so it is none of transformers; name a"
            " .safetensors file, such as last.safetensors of a run"
        )
