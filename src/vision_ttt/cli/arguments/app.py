"""The arguments of `vision-ttt app`."""

from dataclasses import dataclass

import jsonargparse

from vision_ttt.cli.arguments.inference import DeviceFlag
from vision_ttt.cli.checks import check_input_file
from vision_ttt.cli.parser import CommandParser, within
from vision_ttt.extras import require
from vision_ttt.pretrained import weights_path

_EPILOG = """Examples:

  vision-ttt app
  vision-ttt app vittt_nano_patch4_32.digits
  vision-ttt app runs/demo/best.safetensors deit_tiny_patch16_224
  vision-ttt app runs/*/last.safetensors --host 0.0.0.0 --port 8080"""


@dataclass
class _Flags:
    """Where the page is served."""

    host: str = "127.0.0.1"
    """address to listen on; by default the page is reachable from this machine only, with 0.0.0.0
    from other machines, too"""
    port: int = within(7860, 1, 65_535)
    """port to listen on"""


def add_arguments(parser: CommandParser) -> None:
    """Declare the models that visitors may choose, and where the page is served."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "models",
        type=str,
        nargs="*",
        default=[],
        help="checkpoints (.safetensors), names of packaged weights (MODEL.TAG), and names of"
        " models, which have random weights; visitors select among these and the models of"
        " `vision-ttt models`, and cannot open other files",
    )
    parser.add_fields(_Flags)
    parser.add_fields(DeviceFlag)


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse checkpoints that are not there; name missing packages."""
    require("app", "vision-ttt app")
    arguments.models = [weights_path(given) for given in arguments.models]
    for given in arguments.models:
        if given.endswith(".safetensors"):
            check_input_file("the checkpoint", given)
