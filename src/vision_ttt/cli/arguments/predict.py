"""The arguments of `vision-ttt predict`."""

from dataclasses import dataclass
from pathlib import Path

import jsonargparse

from vision_ttt.cli.arguments.inference import CHECKPOINT, DeviceFlag, InferenceFlags
from vision_ttt.cli.checks import (
    check_new_folder,
    check_output_file,
    check_readable,
    checkpoint_path,
)
from vision_ttt.cli.parser import CommandParser, within
from vision_ttt.errors import UserError

_EPILOG = """Examples:

  vision-ttt predict photo.jpg --checkpoint runs/digits/last.safetensors
  vision-ttt predict FOLDER --checkpoint C.safetensors --output answers.csv --skip-bad
  vision-ttt predict FOLDER --checkpoint runs/coco-vittt-tiny/best.safetensors --pictures drawn"""


@dataclass
class _Flags:
    """The form of the answer."""

    topk: int | None = within(None, 1, 1_000_000)
    """most classes or objects per image; null: 5 classes, all objects (pictures and the terminal
    show those with a score of at least 0.5), every class of a segmentation"""
    output: str | None = None
    """a .csv or .json file to write instead of printing"""
    pictures: str | None = None
    """folder for a picture of each file with the predictions drawn on it"""
    masks: str | None = None
    """folder for a segmenter's masks: for each file a .png of indices into the checkpoint's
    classes, from 0; ADE20K's own masks count from 1"""
    overwrite: bool = False
    """overwrite an existing output, picture or mask"""
    json: bool = False
    """print JSON instead of tables"""


def add_arguments(parser: CommandParser) -> None:
    """Declare the images, the checkpoint and the form of the answer."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "files", type=str, nargs="+", help="image files, or folders for all images in them"
    )
    parser.add_argument("--checkpoint", type=str, required=True, help=CHECKPOINT)
    parser.add_fields(_Flags)
    parser.add_fields(InferenceFlags)
    parser.add_fields(DeviceFlag)


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse files that are not there, and an output that cannot be written."""
    if arguments.output is not None:
        check_output_file(
            "the output",
            arguments.output,
            suffixes=(".csv", ".json"),
            overwrite=arguments.overwrite,
        )
    if arguments.pictures is not None:
        check_new_folder("the folder of pictures", arguments.pictures)
    if arguments.masks is not None:
        check_new_folder("the folder of masks", arguments.masks)
        if arguments.pictures is not None and (
            Path(arguments.masks).resolve() == Path(arguments.pictures).resolve()
        ):
            raise UserError(f"--masks and --pictures are both {arguments.masks}; they must differ")
    arguments.checkpoint = checkpoint_path(arguments.checkpoint)
    for file in arguments.files:
        # What is no file is refused when it is opened, where --skip-bad may skip it.
        check_readable("the file", file)
