"""The arguments of `vision-ttt sample`."""

from dataclasses import dataclass
from pathlib import Path

import jsonargparse

from vision_ttt.cli.arguments.inference import DeviceFlag
from vision_ttt.cli.checks import (
    LARGEST_BATCH,
    check_input_file,
    check_new_folder,
    check_output_file,
)
from vision_ttt.cli.parser import CommandParser, within
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


@dataclass
class _Flags:
    """The model, what to generate, how, and where to."""

    checkpoint: str
    """path of a diffusion model's last.safetensors, from train or convert"""
    classes: str | None = None
    """names of classes, their numbers from 0, or ranges of numbers, with commas between, e.g. 0-9
    or cat,dog; null: all, or the first 10 of more"""
    per_class: int = within(10, 1, MOST_IMAGES)
    """images of each class"""
    guidance: float = within(1.5, 0, 1_000)
    """scale of classifier-free guidance; 1: none, larger: clearer and less varied images"""
    steps: int | None = within(None, 1, MOST_STEPS)
    """steps from noise to image; more are finer and slower; null: 50, or the noise steps of the
    training if they are fewer"""
    sampler: str | None = None
    """ddim (only the first noise is random) or ddpm (every step is random) for objective noise,
    euler for objective flow; null: ddim or euler"""
    seed: int = within(0, 0, 2**63 - 1)
    """seed of all noise"""
    output: str = "samples.png"
    """the file to write: .png for a picture with a labelled row for each class, or .safetensors for
    the tensors samples [N, C, H, W] and labels [N]"""
    autoencoder: str | None = None
    """autoencoder of diffusers that makes pictures of latents, a folder or a name in the local
    cache; null: that of the training"""
    images: str | None = None
    """a new folder for separate images, as CLASS/NUMBER.png"""
    batch_size: int = within(100, 1, LARGEST_BATCH)
    """images at once"""
    overwrite: bool = False
    """overwrite existing output"""


def add_arguments(parser: CommandParser) -> None:
    """Declare the flags."""
    parser.epilog = _EPILOG
    parser.add_fields(_Flags)
    parser.add_fields(DeviceFlag)


def check(arguments: jsonargparse.Namespace) -> None:
    """Raise UserError where there is no checkpoint, or an output cannot be written."""
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
