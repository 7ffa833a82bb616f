"""Put the weights of a run into the package, with a model card::

    python packaging/package_weights.py runs/digits/last.safetensors digits --limits "…"

From then on they are the pretrained weights MODEL.TAG. They are written in half precision (float16)
and evaluated as written, as `vision-ttt eval` does; the card says what the run's files and this
evaluation say, and what its limits are. Weights that timm would not load by their name alone,
because the model has arguments of its own, are refused, and so are weights that half precision
cannot hold.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from timm.models import PretrainedCfg
from torch import Tensor, nn

from vision_ttt import pretrained, tasks
from vision_ttt.dense import LinearSegmenter
from vision_ttt.engine.checkpoint import ModelMetadata, read_weights, save_weights
from vision_ttt.engine.config import section_types
from vision_ttt.engine.section import defaults
from vision_ttt.models.packaged_weights import input_cfg, weights_cfg
from vision_ttt.tasks.checkpoints import load_model

CARD = """# {name}

Weights of `{model}`, trained for {length} by vision-ttt {version}, in
half precision: {parameters:,} parameters, {size:.2f} MB. They come with the package, and load
after `import vision_ttt`:

    timm.create_model("{name}", pretrained=True)

- Task: {task}.
- Data: {data}.
- Input: {input}.
- Licence: {licence}.

## Result

On {images} test images, as stored, on a CPU in float32:

{result}

The weights are those of the run's `{file}`{averaged}. The same figures again:
`vision-ttt eval {name}`.

## Limits

{limits}

## Recipe

`vision-ttt train FILE.yaml` with the following file; other fields have their defaults.
The run was made with {libraries}, on {device}, threads: {threads}.

```yaml
{recipe}```
"""


def main(words: list[str] | None = None, folder: Path = pretrained.FOLDER) -> None:
    """Package as the command line says."""
    parser = argparse.ArgumentParser(description="Put the weights of a run into the package.")
    parser.add_argument("checkpoint", type=Path, help="RUN/last.safetensors, in its run's folder")
    parser.add_argument("tag", help="what tells the weights from others of the model")
    parser.add_argument("--limits", required=True, help="what they are not good for: a paragraph")
    given = parser.parse_args(words)
    if not given.tag.isidentifier():
        raise SystemExit(f"the tag {given.tag!r} must be a word of letters, digits and _")
    weights, metadata = read_weights(given.checkpoint)
    name = f"{metadata.model}.{given.tag}"
    halves = {key: halved(key, value) for key, value in weights.items()}
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / f"{name}.safetensors"
        save_weights(made, halves, metadata)
        check_loads(made, metadata)
        figures = evaluated(made)
        metrics = {f"test_{key}": x for key, x in figures.items() if isinstance(x, float)}
        file = folder / made.name
        save_weights(file, halves, dataclasses.replace(metadata, metrics=metrics))
    text = card(name, file, given.checkpoint, figures, given.limits)
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")


def halved(name: str, value: Tensor) -> Tensor:
    """Return a tensor in half precision; what is no number with a fraction stays as it is."""
    if not value.is_floating_point():
        return value
    half = value.half()
    if not half.isfinite().all():
        raise SystemExit(f"{name} holds {value.abs().max()}; half precision goes up to 65,504")
    return half


def check_loads(file: Path, metadata: ModelMetadata) -> None:
    """Refuse weights of which timm, given the model's name, makes another model than their own."""
    own, _ = load_model(file, task=metadata.task["name"])
    with torch.device("meta"):
        config = timm.create_model(metadata.model).pretrained_cfg
    described = PretrainedCfg(**{**config, **weights_cfg(str(file))})
    images = torch.randn(2, *described.input_size)
    try:
        loaded = timm.create_model(metadata.model, pretrained=True, pretrained_cfg=described).eval()
        with torch.inference_mode():
            same = same_logits(own, loaded, images)
    except (RuntimeError, ValueError):  # shapes differ, or the images' size
        same = False
    if not same:
        raise SystemExit(
            f"{metadata.model} with {metadata.model_args} is not the model that timm makes of its"
            " name: register a model with these arguments"
        )


def same_logits(own: nn.Module, loaded: nn.Module, images: Tensor) -> bool:
    """Whether a model of a run and a classifier compute the same; of a segmenter, of each token."""
    if not isinstance(own, LinearSegmenter):
        return torch.equal(loaded(images), own(images))
    (tokens,) = own.maps(images)
    logits = loaded.head(loaded.forward_features(images))
    # A convolution and a linear layer round differently.
    return torch.allclose(logits, own.head(tokens).flatten(2).mT, rtol=1e-4, atol=1e-4)


def evaluated(file: Path) -> dict[str, Any]:
    """Return what `vision-ttt eval` says about weights."""
    command = [sys.executable, "-m", "vision_ttt", "eval", str(file), "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def card(name: str, file: Path, checkpoint: Path, figures: dict[str, Any], limits: str) -> str:
    """Return the model card of packaged weights, from the files of the run that made them."""
    weights, metadata = read_weights(file)
    run = json.loads((checkpoint.parent / "environment.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((checkpoint.parent / "config.yaml").read_text(encoding="utf-8"))
    versions = run["versions"]
    told = input_cfg(metadata.task["name"], metadata.carried["input"])
    numbers = [(key, x) for key, x in figures.items() if isinstance(x, float)]
    return CARD.format(
        name=name,
        model=metadata.model,
        length=length_of(metadata),
        version=metadata.vision_ttt,
        parameters=sum(value.numel() for value in weights.values()),
        size=file.stat().st_size / 1e6,
        task=f"{metadata.task['name']}, {len(metadata.carried['classes'])} classes",
        data=f"{data_of(metadata.data)}, its part for training",
        input=", ".join(f"{key} {value}" for key, value in told.items()),
        licence=timm.models.get_pretrained_cfg(metadata.model).license,
        images=figures["images"],
        result="\n".join(f"- {key.replace('_', ' ')}: {value:.4g}" for key, value in numbers),
        file=checkpoint.name,
        averaged=", an exponential moving average" if metadata.averaged else "",
        limits=textwrap.fill(limits, 100),
        libraries=", ".join(f"{each} {versions[each]}" for each in ("torch", "timm")),
        device=run["device_name"],
        threads=run["threads"],
        recipe=recipe_of(config),
    )


def length_of(metadata: ModelMetadata) -> str:
    """Return how long a model was trained: of rendered data, less than an epoch."""
    updates = f"{metadata.update:,} updates"
    return f"{metadata.epoch} epochs ({updates})" if metadata.epoch else updates


def data_of(data: dict[str, Any]) -> str:
    """Return the name of a run's dataset, with its options where it is a registered one."""
    name = data["dataset"] if "dataset" in data else data["root"]
    options = ", ".join(f"{key} {value}" for key, value in data.get("root_options", {}).items())
    return f"`{name}` ({options})" if options else f"`{name}`"


def recipe_of(config: dict[str, Any]) -> str:
    """Return a run's configuration as a recipe, without what is so by default."""
    usual = section_types(tasks.find(config["task"]["name"]))
    recipe = {
        section: {
            key: value
            for key, value in fields.items()
            if key in ("name", "seed") or value != defaults(usual[section])[key]
        }
        for section, fields in config.items()
    }
    recipe["run"].pop("output", None)
    chosen = {section: fields for section, fields in recipe.items() if fields}
    return yaml.safe_dump(chosen, sort_keys=False)


if __name__ == "__main__":
    main()
