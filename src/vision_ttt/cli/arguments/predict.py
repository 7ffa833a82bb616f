"""The arguments of `vision-ttt predict`."""

from pathlib import Path

import jsonargparse

from vision_ttt.cli.arguments.inference import (
    CHECKPOINT,
    add_device_argument,
    add_inference_arguments,
)
from vision_ttt.cli.checks import (
    LARGEST_BATCH,
    check_new_folder,
    check_output_file,
    check_range,
    check_readable,
    checkpoint_path,
)
from vision_ttt.cli.parser import CommandParser
from vision_ttt.engine.config import MOST_WORKERS
from vision_ttt.errors import UserError

_EPILOG = """Examples:

  vision-ttt predict photo.jpg --checkpoint runs/digits/last.safetensors
  vision-ttt predict FOLDER --checkpoint C.safetensors --output answers.csv --skip-bad
  vision-ttt predict FOLDER --checkpoint runs/coco-vittt-tiny/best.safetensors --pictures drawn"""


def add_arguments(parser: CommandParser) -> None:
    """Declare the images, the checkpoint and the form of the answer."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "files", type=str, nargs="+", help="image files, or folders for all images in them"
    )
    parser.add_argument("--checkpoint", type=str, required=True, help=CHECKPOINT)
    parser.add_argument(
        "--topk",
        type=int | None,
        default=None,
        help="most classes or objects per image; null: 5 classes, all objects (pictures"
        " and the terminal show those with a score of at least 0.5), every class of a segmentation",
    )
    parser.add_argument(
        "--output",
        type=str | None,
        default=None,
        help="a .csv or .json file to write instead of printing",
    )
    parser.add_argument(
        "--pictures",
        type=str | None,
        default=None,
        help="folder for a picture of each file with the predictions drawn on it",
    )
    parser.add_argument(
        "--masks",
        type=str | None,
        default=None,
        help="folder for a segmenter's masks: for each file a .png of indices into the"
        " checkpoint's classes, from 0; ADE20K's own masks count from 1",
    )
    parser.add_argument(
        "--overwrite",
        type=bool,
        default=False,
        help="overwrite an existing output, picture or mask",
    )
    parser.add_argument("--json", type=bool, default=False, help="print JSON instead of tables")
    add_inference_arguments(parser)
    add_device_argument(parser)


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse numbers out of range, files that are not there, an output that cannot be written."""
    check_range(
        arguments,
        topk=(1, 1_000_000),
        batch_size=(1, LARGEST_BATCH),
        num_workers=(0, MOST_WORKERS),
    )
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
