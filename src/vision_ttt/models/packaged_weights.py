"""timm's description of packaged weights, as their files tell it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors import safe_open
from timm.models import DefaultCfg, generate_default_cfgs

from vision_ttt.pretrained import pretrained_of, weights_path

_METADATA = "vision_ttt"


def family_cfgs(cfgs: Mapping[str, Mapping[str, Any]]) -> dict[str, DefaultCfg]:
    """timm's table of a family: its models as they are by default, and by tag with weights.

    A model's own description remains its default, with or without weights: which weights are
    loaded, and hence how many classes there are, is always said by a tag.

    Args:
        cfgs: name of a model → its description, without weights.
    """
    tagged = {
        name: {**cfg, **weights_cfg(weights_path(name))}
        for model, cfg in cfgs.items()
        for name in pretrained_of(model)
    }
    # timm takes the tag that ends in "*" for the default; the rest of this one is no tag.
    return generate_default_cfgs({**tagged, **{f"{model}.*": cfg for model, cfg in cfgs.items()}})


def weights_cfg(path: str) -> dict[str, Any]:
    """What timm is to know of weights: their file, classes and input.

    Raises:
        KeyError: the file describes neither a classifier of images nor a segmenter.
    """
    with safe_open(path, framework="pt") as file:
        described = json.loads(file.metadata()[_METADATA])
    carried = described["carried"]
    cfg = input_cfg(described["task"]["name"], carried["input"])
    return {
        **{key: tuple(x) if isinstance(x, list) else x for key, x in cfg.items()},
        "file": path,
        "num_classes": len(carried["classes"]),
        "label_names": tuple(carried["classes"]),
    }


def input_cfg(task: str, carried_input: Mapping[str, Any]) -> dict[str, Any]:
    """timm's words for the images that a model expects.

    Args:
        task: that it was trained for, "classification" or "segmentation".
        carried_input: what its checkpoint says of its input.

    Raises:
        KeyError: the task is another one.
    """
    if task == "classification":
        return dict(carried_input)
    if task != "segmentation":
        raise KeyError(task)
    side = carried_input["test_shorter_side"]
    return {  # of whole images: nothing is cropped
        "input_size": [3, side, side],
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "mean": carried_input["mean"],
        "std": carried_input["std"],
    }
