"""The arguments of `vision-ttt sample`."""

from pathlib import Path

import jsonargparse

from vision_ttt.cli.checks import (
    LARGEST_BATCH,
    check_input_file,
    check_new_folder,
    check_output_file,
    check_range,
)
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError

MOST_IMAGES = 10_000  # of a class
MOST_STEPS = 10_000

_EPILOG = """Examples:

  vision-ttt sample --checkpoint runs/digits-diffusion/last.safetensors --output digits.png
  vision-ttt sample --checkpoint C.safetensors --classes cat,dog --per-class 4 --images FOLDER

The noise of an image depends on the seed and its index: the same command returns the
same images, and more steps return similar ones. Guidance makes images more typical of their class:
1 disables it; 1.5 to 4 reduce variety, increase clarity and take twice as long. To evaluate the
images with a classifier: --images FOLDER, then vision-ttt eval CLASSIFIER --dataset FOLDER --split
all."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the model, what to generate, how, and where to."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--checkpoint",
        type=str,
        required=True,
        help="path of a diffusion model's last.safetensors, from train or convert",
    )
    parser.add_argument(
        "--classes",
        type=str | None,
        default=None,
        help="names of classes, their numbers from 0, or ranges of numbers, with commas between,"
        " e.g. 0-9 or cat,dog; null: all, or the first 10 of more",
    )
    parser.add_argument("--per_class", type=int, default=10, help="images of each class")
    parser.add_argument(
        "--guidance",
        type=float,
        default=1.5,
        help="scale of classifier-free guidance; 1: none, larger: clearer and less varied images",
    )
    parser.add_argument(
        "--steps", type=int, default=50, help="steps from noise to image; more are finer and slower"
    )
    parser.add_argument(
        "--sampler",
        type=str | None,
        default=None,
        help="ddim (only the first noise is random) or ddpm (every step is random) for objective"
        " noise, euler for objective flow; null: ddim or euler",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all noise")
    parser.add_argument(
        "--output",
        type=str,
        default="samples.png",
        help="the file to write: .png for a picture with a labelled row for each class, or"
        " .safetensors for the tensors samples [N, C, H, W] and labels [N]",
    )
    parser.add_argument(
        "--autoencoder",
        type=str | None,
        default=None,
        help="autoencoder of diffusers that makes pictures of latents, a folder or a name in the"
        " local cache; null: that of the training",
    )
    parser.add_argument(
        "--images",
        type=str | None,
        default=None,
        help="a new folder for separate images, as CLASS/NUMBER.png",
    )
    parser.add_argument("--batch_size", type=int, default=100, help="images at once")
    parser.add_argument("--overwrite", type=bool, default=False, help="overwrite existing output")


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse numbers out of range, no checkpoint, and outputs that cannot be written."""
    check_range(
        arguments,
        per_class=(1, MOST_IMAGES),
        steps=(1, MOST_STEPS),
        batch_size=(1, LARGEST_BATCH),
        guidance=(-1_000, 1_000),
        seed=(0, 2**63 - 1),
    )
    check_output_file(
        "the output",
        arguments.output,
        suffixes=(".png", ".safetensors"),
        overwrite=arguments.overwrite,
    )
    if arguments.images is not None:
        check_new_folder("--images", arguments.images)
        folder = Path(arguments.images)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"the folder for images {folder} already exists and is not empty")
    check_input_file("the checkpoint", arguments.checkpoint)
