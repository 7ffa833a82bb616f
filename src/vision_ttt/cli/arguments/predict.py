"""The arguments of `vision-ttt predict`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import jsonargparse

from vision_ttt.cli.arguments.inference import CHECKPOINT, DeviceFlag, InferenceFlags, JsonFlag
from vision_ttt.cli.checks import (
    check_new_folder,
    check_output_file,
    check_readable,
    checkpoint_path,
    flag,
)
from vision_ttt.cli.parser import CommandParser, within
from vision_ttt.errors import UserError

_EPILOG = """Examples:

  vision-ttt predict photo.jpg --checkpoint runs/digits/last.safetensors
  vision-ttt predict FOLDER --checkpoint C.safetensors --output answers.csv --skip-bad
  vision-ttt predict FOLDER --checkpoint runs/coco-vittt-tiny/best.safetensors --pictures drawn
  vision-ttt predict scene.tif --checkpoint C --whole --memory 2GiB --output mask.tif
  vision-ttt predict slide.svs --checkpoint C --whole --mpp 0.5 --features tokens.zarr"""


@dataclass
class _Flags:
    """The form of the answer."""

    topk: int | None = within(None, 1, 1_000_000)
    """largest number of classes or objects per image; null: 5 classes of a classifier, all objects
    of a detector (pictures and the terminal show those with a score of at least 0.5), all classes
    of a segmenter"""
    output: str | None = None
    """a .csv or .json file to write instead of printing; with --whole the .tif of the mask"""
    pictures: str | None = None
    """folder for a picture of each file with the predictions drawn on it; sub-folders of a given
    folder are kept"""
    masks: str | None = None
    """folder for a segmenter's masks: for each file a .png of indices into the checkpoint's
    classes, from 0; ADE20K's own masks count from 1; sub-folders are kept likewise"""
    overwrite: bool = False
    """overwrite an existing output, picture or mask"""


@dataclass
class _WholeFlags:
    """One picture of any size (docs/large-pictures.md)."""

    whole: bool = False
    """process one picture at its own size, in bands of rows, and write a linear segmenter's mask,
    or any model's tokens; reads .tif .npy .svs .zarr and others"""
    reader: Literal["array", "tiff", "raster", "slide", "zarr"] | None = None
    """reader of the picture; null: chosen by the suffix; for GeoTIFF rasterio, if installed"""
    level: int | None = within(None, 0, 1000)
    """level of a slide or OME-Zarr picture, 0 is the finest; null: 0"""
    mpp: float | None = within(None, 1e-6, 1e6)
    """microns per pixel, instead of a level: use the coarsest level whose pixels are no wider"""
    largest: float | None = within(None, 1e-6, 1e9)
    """pixel value that is white, e.g. 10000; null: the largest value of the pixels' dtype, or 1 for
    floating-point pixels"""
    features: str | None = None
    """write the model's tokens [rows, columns, D] to this .zarr instead of a mask"""
    feature_dtype: Literal["float16", "float32"] | None = None
    """dtype of these tokens; null: float16"""
    memory: str | None = None
    """memory that the process may take, e.g. 2GiB; null: as much as is fastest"""
    scratch: str | None = None
    """folder for the tokens, from which a killed run can resume; null: a hidden folder next to the
    output"""
    storage: Literal["float32", "bfloat16"] | None = None
    """dtype of the tokens in the scratch folder; null: float32"""
    preview: str | None = None
    """also write a small .png of the mask to this path"""


_OF_WHOLE = (*(field.name for field in fields(_WholeFlags) if field.name != "whole"), "bands")


def add_arguments(parser: CommandParser) -> None:
    """Declare the images, the checkpoint and the form of the answer."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "files", type=str, nargs="+", help="image files, or folders for all images in them"
    )
    parser.add_argument("--checkpoint", type=str, required=True, help=CHECKPOINT)
    parser.add_fields(_Flags)
    parser.add_fields(JsonFlag)
    parser.add_fields(_WholeFlags)
    parser.add_argument(
        "--bands",
        type=int,
        nargs="+",
        default=None,
        help="with --whole, numbers of a raster's bands, from 1, e.g. 4 3 2; null: all but alpha",
    )
    parser.add_fields(InferenceFlags)
    parser.add_fields(DeviceFlag)


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse files that are not there, and an output that cannot be written."""
    if arguments.whole:
        _check_whole(arguments)
    elif given := [name for name in _OF_WHOLE if arguments[name] is not None]:
        raise UserError(f"{flag(given[0])} is for whole pictures; give --whole, too")
    if arguments.output is not None and not arguments.whole:
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


def _check_whole(arguments: jsonargparse.Namespace) -> None:
    """Refuse what does not go with --whole."""
    for name in ("topk", "pictures", "masks", "json", "skip_bad", "num_workers"):
        if arguments[name]:
            raise UserError(f"{flag(name)} does not go with --whole")
    if arguments.device not in (None, "cpu"):
        raise UserError(f"--device is {arguments.device}; --whole runs on the cpu")
    if len(arguments.files) != 1:
        raise UserError(f"--whole is for one picture; {len(arguments.files)} are given")
    check_readable("the picture", arguments.files[0])
    overwrite, features = arguments.overwrite, arguments.features
    if (arguments.output is None) == (features is None):
        raise UserError(
            "--whole writes a mask or tokens; name one of them: --output mask.tif, or --features "
            "tokens.zarr"
        )
    if features is not None:
        if arguments.preview is not None:
            raise UserError("--preview requires a mask; it is not accepted with --features")
        if Path(features).suffix.lower() != ".zarr":
            raise UserError(f"the features {features} must be a .zarr folder")
        check_new_folder("the features", features)
        if Path(features).exists() and not overwrite:
            raise UserError(
                f"the features {features} already exist; name another folder, or give --overwrite"
            )
    elif arguments.feature_dtype is not None:
        raise UserError(f"--feature-dtype is {arguments.feature_dtype}; it is for --features")
    for name, given, suffixes in (
        ("the output", arguments.output, (".tif", ".tiff")),
        ("the preview", arguments.preview, (".png",)),
    ):
        if given is not None:
            check_output_file(name, given, suffixes=suffixes, overwrite=overwrite)
    for written in (arguments.output, features, arguments.preview):
        if written is not None and Path(written).resolve() == Path(arguments.files[0]).resolve():
            raise UserError(f"the output is the picture itself: {written}")
    if arguments.scratch is not None:
        check_new_folder("the scratch folder", arguments.scratch)
