"""The arguments of `vision-ttt eval`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jsonargparse

from vision_ttt.cli.arguments.inference import CHECKPOINT, InferenceFlags, JsonFlag
from vision_ttt.cli.checks import checkpoint_path, flag, shortened
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError
from vision_ttt.file_kinds import is_of_the_system

_EPILOG = """Examples:

  vision-ttt eval runs/digits/last.safetensors
  vision-ttt eval vittt_nano_patch4_32.digits
  vision-ttt eval runs/folder/best.safetensors --dataset OTHER --split all --json"""


@dataclass
class _Flags:
    """The dataset."""

    dataset: str | None = None
    """other data: for a classifier what `vision-ttt train --dataset` accepts, for a detector or
    segmenter a folder of the same layout, for a language model a folder of documents; null: the
    data of the training"""
    dataset_root: str | None = None
    """folder of fashion-mnist, elpv, or a dataset that timm reads by name"""
    split: Literal["test", "train", "all"] = "test"
    """part of the dataset, divided as in training"""
    evaluation: Literal["whole", "slide"] | None = None
    """input of a segmenter: the whole image or sliding windows; null: as in training"""
    fid: str | None = None
    """folder of a diffusion model's images, from vision-ttt sample --images; instead of the loss,
    measure the Fréchet distance of these images to the part --split of the data"""
    fid_features: str | None = None
    """classifier's checkpoint whose features are compared; null: Inception's (FID), which the
    package torch-fidelity downloads"""


def add_arguments(parser: CommandParser) -> None:
    """Declare the checkpoint, the dataset and how to go through it."""
    parser.epilog = _EPILOG
    parser.add_argument("checkpoint", type=str, help=CHECKPOINT)
    for declared in (_Flags, InferenceFlags, JsonFlag):
        parser.add_fields(declared)


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse a missing checkpoint, and an empty dataset name."""
    if arguments.dataset is not None and not arguments.dataset.strip():
        raise UserError("--dataset is empty; name one, or leave it out for the one trained on")
    if arguments.dataset is not None and is_of_the_system(Path(arguments.dataset)):
        raise UserError(
            f"--dataset {arguments.dataset} is in /proc or /sys; name a dataset of your own"
        )
    arguments.checkpoint = checkpoint_path(arguments.checkpoint)
    if arguments.fid is not None:
        for name in ("evaluation", "skip_bad", "num_workers"):
            if arguments[name]:
                raise UserError(f"{flag(name)} does not go with --fid")
        if arguments.dtype != "float32":
            raise UserError(f"--dtype is {arguments.dtype}; --fid compares features in float32")
        if not Path(arguments.fid).is_dir():
            raise UserError(f"--fid {shortened(arguments.fid)} is no folder of images")
    if arguments.fid_features is not None:
        if arguments.fid is None:
            raise UserError("--fid-features is given without --fid, a folder of images")
        arguments.fid_features = checkpoint_path(arguments.fid_features)
