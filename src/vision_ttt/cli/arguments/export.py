"""The arguments of `vision-ttt export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jsonargparse

from vision_ttt.cli.arguments.inference import CHECKPOINT
from vision_ttt.cli.checks import LARGEST_BATCH, check_output_file, checkpoint_path
from vision_ttt.cli.parser import CommandParser, within
from vision_ttt.errors import UserError

_EPILOG = """Examples:

  vision-ttt export runs/digits/last.safetensors exported
  vision-ttt export runs/digits/last.safetensors digits.onnx --dynamic-size
  vision-ttt export runs/digits/last.safetensors digits.pt2 --portable
  vision-ttt export runs/digits/last.safetensors digits.openvino --kernels"""


@dataclass
class _Flags:
    """Which images the result accepts, and how it is written."""

    batch_size: int | None = within(None, 1, LARGEST_BATCH)
    """images per call of an .onnx, .openvino or .pt2; null: any number"""
    dynamic_size: bool = False
    """accept images of any height and width that are whole patches, but for timm's folder"""
    portable: bool = False
    """write a .pt2 of PyTorch's operations only, which loads without vision_ttt; slower"""
    kernels: bool = False
    """in an .onnx or .openvino: make the blocks nodes for the compiled kernels, several times as
    fast. The command requires our library for ONNX Runtime or OpenVINO (in a checkout: make
    onnxruntime, make openvino). On a machine without it ONNX Runtime runs the .onnx about as fast
    as one without this option, and OpenVINO refuses the file"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """with kernels: dtype of the blocks; bfloat16 is faster on processors that multiply it, and is
    compared with a tolerance of 5 % of the largest output"""
    overwrite: bool = False
    """overwrite existing output"""
    traceback: bool = False
    """show the exporter's traceback if the model cannot be exported"""


def add_arguments(parser: CommandParser) -> None:
    """Declare the checkpoint, where it goes, and which images the result accepts."""
    parser.epilog = _EPILOG
    parser.add_argument("checkpoint", type=str, help=CHECKPOINT)
    parser.add_argument(
        "output",
        type=str,
        help="its name selects the format: FILE.onnx, FILE.pt2 (torch.export), FOLDER.openvino,"
        " or a folder for timm and the Hugging Face hub (model.safetensors and config.json)",
    )
    parser.add_fields(_Flags)


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse what does not fit together, and what cannot be read or written."""
    output = Path(arguments.output)
    if output.suffix not in ("", ".onnx", ".openvino", ".pt2") or not output.name:
        raise UserError(
            f"the output {arguments.output!r} must be a .onnx or .pt2 file, a .openvino folder, or"
            " a folder (a name without suffix)"
        )
    if arguments.portable and output.suffix != ".pt2":
        raise UserError(f"--portable is for a .pt2 file, not for {output}")
    if arguments.kernels and output.suffix not in (".onnx", ".openvino"):
        raise UserError(f"--kernels is for a .onnx file or a .openvino folder, not for {output}")
    if arguments.dtype != "float32" and not arguments.kernels:
        raise UserError(f"--dtype {arguments.dtype} is for --kernels")
    if output.suffix == "" and (arguments.dynamic_size or arguments.batch_size is not None):
        raise UserError("--batch-size and --dynamic-size are for .onnx, .openvino and .pt2")
    if output.exists() and not arguments.overwrite:
        raise UserError(f"{output} already exists; name another, or give --overwrite")
    is_folder = output.suffix in ("", ".openvino")
    if output.is_file() and is_folder:
        raise UserError(f"{output} is a file, and a folder is to be written; name another")
    if not (is_folder and output.is_dir()):
        check_output_file("the output", arguments.output, suffixes=(output.suffix,), overwrite=True)
    arguments.checkpoint = checkpoint_path(arguments.checkpoint)
