"""The arguments of every command that runs a checkpoint on images."""

from typing import Literal

from vision_ttt.cli.parser import CommandParser

CHECKPOINT = (
    "path of a last.safetensors, or the name of packaged weights, as `vision-ttt models` lists them"
)
"""What a checkpoint may be, for help."""


def add_inference_arguments(parser: CommandParser) -> None:
    """Declare how images are read and in which precision the model computes."""
    parser.add_argument("--batch_size", type=int, default=64, help="images per forward pass")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that decode images")
    parser.add_argument(
        "--dtype",
        type=Literal["float32", "bfloat16"],
        default="float32",
        help="dtype of weights and activations; bfloat16 is faster on processors that multiply it",
    )
    parser.add_argument(
        "--skip_bad",
        type=bool,
        default=False,
        help="skip, name and count images that do not decode; otherwise stop",
    )


def add_device_argument(parser: CommandParser) -> None:
    """Declare where the model runs, see `vision_ttt.cli.device`."""
    parser.add_argument(
        "--device",
        type=str | None,
        default=None,
        help="cpu, cuda, cuda:1, …; null: a GPU if there is one",
    )
