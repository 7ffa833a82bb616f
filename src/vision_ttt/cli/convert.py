"""`vision-ttt convert IN OUT --model NAME`."""

from pathlib import Path
from typing import Any

import jsonargparse
import timm
from rich.console import Console
from timm.data import ImageNetInfo
from torch import nn

from vision_ttt.bench import count_parameters
from vision_ttt.cli.main import CommandParser
from vision_ttt.convert import FAMILIES, Family, read_release, remap
from vision_ttt.engine.building import build_model, data_config
from vision_ttt.engine.checkpoint import ModelMetadata, load_model, save_weights
from vision_ttt.errors import UserError, nearest


def add_arguments(parser: CommandParser) -> None:
    """Declare the files and the model."""
    names = ", ".join(family.name for family in FAMILIES)
    parser.add_argument(
        "input",
        type=str,
        help=f"released weights of {names}: a .safetensors file, or a .pth of torch.save",
    )
    parser.add_argument("output", type=str, help="the .safetensors file to write")
    parser.add_argument("--model", type=str, required=True, help="name of the model, see `models`")
    parser.add_argument(
        "--model_args",
        type=dict[str, Any],
        default={},
        help="constructor arguments, where they are not the name's, e.g. --model_args.embed_dim 96",
    )
    parser.add_argument(
        "--overwrite", type=bool, default=False, help="write though the output is there already"
    )


def run(arguments: jsonargparse.Namespace) -> int:
    """Convert, load the result as a user would, and say what was written."""
    output = Path(arguments.output)
    if output.suffix != ".safetensors":
        raise UserError(f"the output {output} must be a .safetensors file")
    if output.exists() and not arguments.overwrite:
        raise UserError(f"{output} is there already; name another file, or give --overwrite")
    if not output.parent.is_dir():
        raise UserError(f"the folder {output.parent} does not exist")
    family = _family_of(arguments.model)
    released = read_release(arguments.input)
    # 1000 classes where nothing tells: remap says what is missing.
    model_args = {"num_classes": 1000, **family.arguments(released), **arguments.model_args}
    model = build_model(arguments.model, model_args)
    weights = remap(released, model)
    model.load_state_dict(weights)
    save_weights(output, weights, _metadata(model, arguments.model, model_args, family))
    loaded, _ = load_model(output, kind=None)
    Console().print(
        f"{output}: {arguments.model}, {len(weights)} tensors, {count_parameters(loaded):,} "
        "parameters, loaded strictly",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def convertible_models() -> list[str]:
    """Names of the models that released weights can be converted for."""
    modules = {family.model.__module__ for family in FAMILIES}
    return [n for n in timm.list_models() if timm.model_entrypoint(n).__module__ in modules]


def _family_of(name: str) -> Family:
    accepted = convertible_models()
    if name not in accepted:
        raise UserError(
            f"no released weights are known for a model {name!r}; nearest: "
            f"{nearest(name, accepted)}"
        )
    module = timm.model_entrypoint(name).__module__
    return next(family for family in FAMILIES if family.model.__module__ == module)


def _metadata(
    model: nn.Module, name: str, model_args: dict[str, Any], family: Family
) -> ModelMetadata:
    """What `eval`, `predict` and `sample` need; classes are ImageNet's folders, or else numbers."""
    count = model_args["num_classes"]
    imagenet = ImageNetInfo()
    named = count == imagenet.num_classes()
    return ModelMetadata(
        model=name,
        model_args=model_args,
        classes=tuple(imagenet.label_names() if named else map(str, range(count))),
        input=data_config(model),
        diffusion=family.diffusion,
    )
