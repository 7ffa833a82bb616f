"""The arguments of `vision-ttt convert`."""

from collections.abc import Iterator
from typing import Any

import jsonargparse

from vision_ttt.cli.checks import check_input_file, check_output_file, shortened
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError

RELEASES = ("ViT³", "H-ViT³", "DiT³", "Vim", "Mamba-Reg", "Vision-RWKV")
"""Whose released weights are read, as `vision_ttt.convert.FAMILIES` calls them."""
# Larger models are a typing error, and would need hours or all memory to build.
_LARGEST = {"depth": 1_000, "depths": 1_000, "img_size": 2_048}
_LARGEST_OF_OTHERS = 100_000

_EPILOG = """Example:

  vision-ttt convert vittt_t.pth vit3_tiny.safetensors --model vit3_tiny_patch16_224"""


def add_arguments(parser: CommandParser) -> None:
    """Declare the files and the model."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "input",
        type=str,
        help=f"released weights of {', '.join(RELEASES)}: a .safetensors file, or a .pth of"
        " torch.save",
    )
    parser.add_argument("output", type=str, help="the .safetensors file to write")
    parser.add_argument("--model", type=str, required=True, help="name of the model, see `models`")
    parser.add_argument(
        "--arguments",
        type=dict[str, Any],
        default={},
        help="constructor arguments that differ from the name's, e.g. --arguments.embed_dim 96",
    )
    parser.add_argument("--overwrite", type=bool, default=False, help="overwrite existing output")


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse files that cannot be read or written, and models of absurd sizes."""
    check_output_file(
        "the output",
        arguments.output,
        suffixes=(".safetensors",),
        overwrite=arguments.overwrite,
    )
    check_input_file("the input", arguments.input)
    for name, value in arguments.arguments.items():
        most = _LARGEST.get(name, _LARGEST_OF_OTHERS)
        for number in _numbers(value):
            if abs(number) > most:
                raise UserError(
                    f"--arguments.{name} is {shortened(number)}; it must be at most {most:,}"
                )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield value
