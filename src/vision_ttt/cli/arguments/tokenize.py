"""The arguments of `vision-ttt tokenize`."""

from pathlib import Path

import jsonargparse

from vision_ttt.cli.checks import check_new_folder
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError

_EPILOG = """Examples:

  vision-ttt tokenize CORPUS tokens/train --pattern "**/*.jsonl.zst" --tokenizer LLAMA
  vision-ttt train pile+125m --dataset tokens/train --validation tokens/validation --tokenizer LLAMA

A training then maps parts of the file of tokens into memory as it needs them, in all processes.
Documents are files of text, or the rows of .jsonl, .jsonl.zst and .parquet files (the last two need
vision-ttt[corpora]). LLAMA is the folder of a tokenizer of transformers."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the documents, the tokenizer and the folder to write."""
    parser.epilog = _EPILOG
    parser.add_argument("dataset", type=str, help="folder of documents, or stdlib")
    parser.add_argument("output", type=str, help="folder to write the tokens into")
    parser.add_argument(
        "--pattern", type=str, default="**/*.txt", help="which files of the folder are read"
    )
    parser.add_argument(
        "--field", type=str, default="text", help="field of a row that holds its text"
    )
    parser.add_argument(
        "--tokenizer",
        type=str,
        default="bytes",
        help="bytes, or the folder of a tokenizer of transformers",
    )
    parser.add_argument(
        "--skip_bad", type=bool, default=False, help="skip and name what cannot be read"
    )
    parser.add_argument(
        "--overwrite", type=bool, default=False, help="replace the tokens in the folder"
    )


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse a folder that holds something, or cannot be made."""
    check_new_folder("the folder", arguments.output)
    folder = Path(arguments.output)
    if folder.is_dir() and any(folder.iterdir()) and not arguments.overwrite:
        raise UserError(f"{folder} is not empty; name another folder, or give --overwrite")
