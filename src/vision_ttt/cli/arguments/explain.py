"""The arguments of `vision-ttt explain gradient-map|inner-loss|norms|…`, see KINDS.

The positional arguments are models, then images. A word is an image if it is a file or folder whose
name does not end in .safetensors, or if it begins with `sample:`; every other word is a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import yaml

from vision_ttt.cli.arguments.inference import DeviceFlag
from vision_ttt.cli.checks import (
    LARGEST_BATCH,
    check_input_file,
    check_new_folder,
    check_readable,
)
from vision_ttt.cli.parser import CommandParser, within
from vision_ttt.errors import UserError, shortened
from vision_ttt.file_kinds import IMAGE_SUFFIXES
from vision_ttt.pretrained import weights_path

KINDS = {
    "gradient-map": "how much the inner models can learn from each token, as a heat map",
    "receptive-field": "the pixels that the feature in the middle responds to",
    "inner-loss": "the loss of the inner models along the tokens, before and after learning",
    "norms": "norms of the tokens after every block, and outliers",
    "distances": "distances of the tokens to the class token, or to each register",
    "fast-weights": "the change of the inner weights along an image, and their learning rates",
}
SAMPLE = "sample:"
WEIGHTS = ".safetensors"
LARGEST_SIDE = 8_192  # pixels
MOST_MODELS = 8  # that a figure shows side by side

_EPILOG = """Examples:

  vision-ttt explain gradient-map runs/digits/best.safetensors sample:digit-0-4 --output figures
  vision-ttt explain inner-loss C.safetensors photo.jpg FOLDER --random --output figures
  vision-ttt explain inner-loss runs/text/last.safetensors --window 10 --output figures
  vision-ttt explain receptive-field vittt_tiny_patch16_224 deit_tiny_patch16_224 FOLDER \\
      --names Vittt DeiT --limit 64 --output figures
  vision-ttt explain gradient-map C.safetensors sample:flower --shorter-side 448 --output figures

`vision-ttt explain WHAT --help` explains the flags of each."""

_READING = """Models: checkpoints (.safetensors) of any task on images, names of packaged weights
(MODEL.TAG), and names of models of this package or of timm, which have random weights;
NAME:KEY=VALUE,KEY=VALUE has constructor arguments, as in resnet18:zero_init_last=false (timm's
default initialises each residual branch with zero). Figures show several models side by side. A
run's earlier weights are in its folder checkpoints; --keep-checkpoints of vision-ttt train sets how
many. Figures of a detector or segmenter show its backbone: gradients, losses and fast weights
within the adapter, receptive field and norms of the backbone alone.

Images: files, folders for all images in them, and sample:NAME for pictures in installed packages:
sample:china, sample:flower (photographs), sample:digit-N, sample:object-N, sample:scene-N
(test images of the demos), each with a range as sample:digit-0-9.

Size: the input of a classifier is that of vision-ttt predict, the centre crop of the resized
picture in the size of training, or the whole picture if it was trained with --naflex; the input of
a detector's or segmenter's backbone is the whole picture in the size of its tests. With
--shorter-side the input of any model is the whole picture, resized to whole patches without
padding; position embeddings are interpolated.

Figures are written as PDF, SVG and PNG, and all numbers in them as WHAT.npz, whose arrays are named
MODEL/IMAGE/… or MODEL/LAYER/…"""


@dataclass
class _Flags:
    """How any kind looks at the models."""

    output: str
    """folder to write into"""
    random: bool = False
    """also show each checkpoint's model with random weights, as before training; once for all
    checkpoints of a model"""
    seed: int = within(0, 0, 2**63 - 1)
    """seed of random weights"""
    shorter_side: int | None = within(None, 1, LARGEST_SIDE)
    """use whole images with a shorter side of so many pixels; null: as in tests"""
    limit: int | None = within(None, 1, 1_000_000)
    """number of images, or of sequences of a language model, the first ones; null: all images, 16
    sequences"""
    batch_size: int = within(8, 1, LARGEST_BATCH)
    """images at once"""
    overwrite: bool = False
    """replace figures of the same names in the folder; figures of other names stay"""


@dataclass
class _GradientMapFlags:
    """What is seen of the gradients."""

    state: Literal["final", "initial", "current"] | None = None
    """state of the inner models at which gradients are taken. initial: before the image. final:
    after it; clearest on images of many mini-batches. current: before the token's mini-batch, the
    paper's definition; the first tokens of a scan have the largest values, since their model is
    untrained. null: initial"""
    last_layers: int = within(1, 1, 1_000)
    """number of last layers to average maps over"""
    fraction: float = within(0.3, 1e-6, 1)
    """share of the tokens that are marked (0 to 1)"""
    sheets: bool = False
    """also write a sheet of all layers, and of all heads and directions, for each image"""


@dataclass
class _InnerLossFlags:
    """How the losses are drawn."""

    window: int | None = within(None, 1, 1_000_000)
    """tokens per running mean; 1: no mean; null: a 64th of all tokens"""
    direction: Literal["forth", "back"] | None = None
    """heads of one scan direction only; forth: as in Vision-TTT's Fig. 11; null: all"""


@dataclass
class _NormsFlags:
    """What is shown of the norms."""

    absolute: bool = False
    """show the norms themselves, and whole distributions; default: norms over the image's median"""


@dataclass
class _FastWeightsFlags:
    """Which figures are drawn."""

    sheets: bool = False
    """also write a figure by head for each quantity"""


_OWN_FLAGS = {
    "gradient-map": _GradientMapFlags,
    "inner-loss": _InnerLossFlags,
    "norms": _NormsFlags,
    "fast-weights": _FastWeightsFlags,
}


def add_arguments(parser: CommandParser) -> None:
    """Declare what to explain; each has flags of its own."""
    parser.epilog = _EPILOG
    summaries = "; ".join(f"{kind}: {summary}" for kind, summary in KINDS.items())
    parser.add_argument("what", type=Literal[tuple(KINDS)], help=summaries)


def parse(parser: CommandParser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """Parse `argv`: what to explain, then its own flags."""
    what = parser.parse_command(argv[:1]).what
    own = CommandParser(f"{parser.prog} {what}", f"show {KINDS[what]}")
    own.epilog = f"{_READING}\n\n{_EPILOG.rpartition(chr(10) * 2)[0]}"
    own.add_argument(
        "given",
        type=str,
        nargs="+",
        help="models or checkpoints, then image files, folders, or sample:NAME; see below. Language"
        " models are shown their test documents, by inner-loss, and need no images",
    )
    own.add_fields(_Flags)
    own.add_argument(
        "--names",
        type=str,
        nargs="+",
        default=None,
        help="labels of the models in figures and arrays; default: from their files",
    )
    own.add_fields(DeviceFlag)
    if what in _OWN_FLAGS:
        own.add_fields(_OWN_FLAGS[what])
    arguments = own.parse_command(argv[1:])
    arguments.what = what
    return arguments


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse what can be known to fail before a model is built."""
    arguments.given = [weights_path(word) for word in arguments.given]
    models, images = split_models_and_images(arguments.given)
    for model in models:
        if model.endswith(WEIGHTS):
            check_input_file("the checkpoint", model)
        elif "/" in model or Path(model).suffix.lower() in IMAGE_SUFFIXES:
            raise FileNotFoundError(2, "No such file", model)
        else:
            name_and_arguments(model)
    if not models:
        raise UserError(f"no model is given, only images ({shortened(images[0])}, …)")
    only_checkpoints = all(model.endswith(WEIGHTS) for model in models)
    if not images and not (arguments.what == "inner-loss" and only_checkpoints):
        raise UserError(f"no image is given, only models ({shortened(models[0])}, …)")
    for image in images:
        if not image.startswith(SAMPLE):
            check_readable("the image", image)
    if arguments.random and not any(model.endswith(WEIGHTS) for model in models):
        raise UserError("--random is for checkpoints; a model that is named has random weights")
    if len(models) > MOST_MODELS:
        raise UserError(f"{len(models)} models are given; a figure shows at most {MOST_MODELS}")
    _check_names(arguments, len(models))
    _check_output(arguments)


def split_models_and_images(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the models and the images that are given, each in their order."""
    images = [each for each in given if _is_image(each)]
    return [each for each in given if not _is_image(each)], images


def name_and_arguments(model: str) -> tuple[str, dict[str, Any]]:
    """Split a named model, NAME or NAME:KEY=VALUE,…, whose values are YAML's.

    Raises:
        UserError: what follows the colon is something else.
    """
    name, colon, given = model.partition(":")
    arguments = {}
    for each in given.split(",") if colon else ():
        key, equals, value = each.partition("=")
        if not (key.isidentifier() and equals and value):
            raise UserError(
                f"{shortened(model)} has {each!r}; a model with constructor arguments is"
                " NAME:KEY=VALUE,KEY=VALUE"
            )
        try:
            arguments[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"{shortened(model)}: {value!r} is no YAML value") from error
    return name, arguments


def _is_image(given: str) -> bool:
    return given.startswith(SAMPLE) or (not given.endswith(WEIGHTS) and Path(given).exists())


def _check_names(arguments: jsonargparse.Namespace, models: int) -> None:
    names = arguments.names
    if names is None:
        return
    if len(names) != models:
        raise UserError(f"--names has {len(names)} names, and {models} models are given")
    for name in names:
        if not name.strip() or "/" in name or names.count(name) > 1:
            raise UserError(f"--names has {shortened(name)!r}; names differ and have no /")


def _check_output(arguments: jsonargparse.Namespace) -> None:
    check_new_folder("--output", arguments.output)
    folder = Path(arguments.output)
    former = sorted(folder.glob(f"{arguments.what}*")) if folder.is_dir() else []
    if former and not arguments.overwrite:
        raise UserError(f"{former[0]} already exists; name another folder, or give --overwrite")
