"""The arguments of `python -m studies paths`."""

import jsonargparse

from vision_ttt.cli.arguments.explain import (
    MOST_MODELS,
    SAMPLE,
    WEIGHTS,
    name_and_arguments,
    split_models_and_images,
)
from vision_ttt.cli.arguments.inference import DeviceFlag
from vision_ttt.cli.checks import check_input_file, check_range, check_readable, check_renewed_file
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError
from vision_ttt.pretrained import weights_path

_EPILOG = """Examples:

  python -m studies paths runs/digits/last.safetensors sample:digit-0-63
  python -m studies paths mambar_tiny_patch16_224 mambar_tiny_patch16_224:distribution=middle \\
      vim_tiny_patch16_224 FOLDER --figure runs/paths.pdf

Models and images are given as to vision-ttt explain: checkpoints, names of packaged weights, and
names of models, which have random weights, then files, folders and sample:NAME. The models are
plain backbones of vision-ttt."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the models, the images, and where the picture goes."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "given", type=str, nargs="+", help="models, then images; see below how they are named"
    )
    parser.add_argument(
        "--draws", type=int, default=4, help="random outputs of each image and block"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws and random weights")
    parser.add_argument(
        "--figure", type=str, default="runs/paths.png", help="picture to write or overwrite"
    )
    parser.add_fields(DeviceFlag)


def check(arguments: jsonargparse.Namespace) -> None:
    """Split models from images; refuse what can be known to fail before a model is built."""
    words = {weights_path(word): word for word in arguments.given}
    arguments.models, arguments.images = split_models_and_images(list(words))
    for name in ("models", "images"):
        if not arguments[name]:
            raise UserError(f"no {name} are given; name models, then images")
    if len(arguments.models) > MOST_MODELS:
        raise UserError(f"{len(arguments.models)} models are given; at most {MOST_MODELS}")
    arguments.names = [words[model] for model in arguments.models]
    for model in arguments.models:
        if model.endswith(WEIGHTS):
            check_input_file("the checkpoint", model)
        else:
            name_and_arguments(model)
    for image in arguments.images:
        if not image.startswith(SAMPLE):
            check_readable("the image", image)
    check_range(arguments, draws=(1, 1_000), seed=(0, 2**63 - 1))
    check_renewed_file("--figure", arguments.figure)
