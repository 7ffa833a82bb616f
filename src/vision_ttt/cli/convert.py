"""`vision-ttt convert IN OUT --model NAME`."""

from pathlib import Path
from typing import Any

import jsonargparse
import torch
from timm.data import ImageNetInfo
from torch import nn

from vision_ttt.bench import count_parameters
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.convert import FAMILIES, Family, read_release, remap
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import ModelMetadata, save_weights
from vision_ttt.errors import UserError, suggestions
from vision_ttt.models.registry import list_models, model_entrypoint
from vision_ttt.tasks import load_model
from vision_ttt.tasks.images.models import data_config


def run(arguments: jsonargparse.Namespace) -> int:
    """Convert, load the result as a user would, and say what was written."""
    output = Path(arguments.output)
    family = _family_of(arguments.model)
    released = read_release(arguments.input)
    # 1000 classes where the weights do not say; remap names what is missing.
    model_args = {"num_classes": 1000, **family.arguments(released), **arguments.arguments}
    with torch.device("meta"):  # what does not fit allocates nothing
        planned = build_model(arguments.model, model_args)
    weights = remap(released, planned)
    model = build_model(arguments.model, model_args)
    model.load_state_dict(weights)
    save_weights(output, weights, _metadata(model, arguments.model, model_args, family))
    loaded, _ = load_model(output, task=None)
    plain_console().say(
        f"{output}: {arguments.model}, {len(weights)} tensors, {count_parameters(loaded):,} "
        "parameters, loaded strictly"
    )
    return 0


def convertible_models() -> list[str]:
    """Names of the models that released weights can be converted for."""
    modules = {family.model.__module__ for family in FAMILIES}
    return [name for name in list_models() if model_entrypoint(name).__module__ in modules]


def _family_of(name: str) -> Family:
    accepted = convertible_models()
    if name not in accepted:
        raise UserError(
            f"no released weights are known for a model {name!r}; {suggestions(name, accepted)}"
        )
    module = model_entrypoint(name).__module__
    return next(family for family in FAMILIES if family.model.__module__ == module)


def _metadata(
    model: nn.Module, name: str, model_args: dict[str, Any], family: Family
) -> ModelMetadata:
    """What `eval`, `predict` and `sample` need; classes are ImageNet's folders, or else numbers."""
    count = model_args["num_classes"]
    own_size = model_args.get("img_size") if family.diffusion is None else None
    imagenet = ImageNetInfo()
    named = count == imagenet.num_classes()
    carried = {
        "classes": list(imagenet.label_names() if named else map(str, range(count))),
        "input": data_config(model, own_size),
    }
    task = "classification"
    if family.diffusion is not None:
        task = "diffusion"
        carried["process"] = family.diffusion
    return ModelMetadata({"name": task}, name, model_args, carried)
