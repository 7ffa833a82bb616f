"""Starting from weights trained before: what is taken of them, and saying so."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download
from timm.models import PretrainedCfg, get_pretrained_cfg
from torch import nn

from vision_ttt.engine.building import describe_model, load_weights
from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.described import read_json
from vision_ttt.engine.tensor_files import read_tensors
from vision_ttt.errors import reason_of, some
from vision_ttt.models.fitted_weights import checkpoint_filter_fn, classifier_weights
from vision_ttt.models.linear_vit import INNER, LinearViT
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.pretrained import weights_path

_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
"""Of files, never of timm's names."""


def weights_file(given: str) -> Path:
    """Return the path of the file of weights that is given by its path or a name.

    The name is that of packaged weights, or of timm's weights, which are downloaded from the
    Hugging Face hub unless they are in its cache.

    Raises:
        ConfigError: the path is a run's folder (names the file in it), timm has no such weights of
            the model, or they cannot be downloaded.
    """
    path = Path(os.path.expanduser(weights_path(given)))
    if (of_run := path / WEIGHTS_FILE).is_file():
        raise ConfigError(f"initial_weights: {given} is a folder; accepted: {of_run}")
    described = None if path.exists() or path.suffix in _SUFFIXES else timms_weights(given)
    if described is None:
        return path
    hub = described.hf_hub_id
    try:
        return Path(hf_hub_download(hub, filename="model.safetensors"))
    except Exception as error:  # of the network, of the hub, of the disk: they have no common class
        raise ConfigError(
            f"initial_weights: {given} names weights of timm, which cannot be downloaded from {hub}"
            f" ({reason_of(error)}); give the path of a .safetensors file with timm's names"
        ) from error


def timms_weights(model: str) -> PretrainedCfg | None:
    """Return the description of timm's weights of NAME or NAME.TAG, None without any on the hub.

    Raises:
        ConfigError: the model has no such tag.
    """
    try:
        described = get_pretrained_cfg(model)
    except RuntimeError as error:
        name = model.partition(".")[0]
        tags = ", ".join(timm.list_pretrained(f"{name}.*")) or "none"
        raise ConfigError(f"there are no weights {model}; of {name} there are {tags}") from error
    return described if described and described.hf_hub_id else None


def start_from(path: Path, model: nn.Module, name: str, model_args: Mapping[str, Any]) -> str:
    """Copy the weights of a file into `model`, and return what was done, in one line.

    Every tensor must fit but the head's. A head of one layer that does not fit becomes zero, as a
    model's own random values may be large; other heads stay as they are. The position embedding is
    interpolated to another input size. A ViT's weights fit its linear counterpart, whose inner
    models then stay as they are.

    Args:
        path: of a safetensors file, ours or not.
        model: named `name`, built with `model_args`.

    Raises:
        FileNotFoundError, CheckpointError: there is no such file, or it is damaged.
        ConfigError: the weights are another model's; says which, where the file does.
    """
    weights, text = read_tensors(path)
    source = described(text)
    is_plain = isinstance(model, PlainBackbone)
    if is_plain:
        weights = classifier_weights(weights, model)
    of_vit = isinstance(model, LinearViT) and model.can_inherit(weights)
    new: tuple[str, ...] = ()
    without_place: list[str] = []
    heads = head_names(model)
    try:
        if of_vit:
            weights, without_place = model.inherited(weights)
            new = tuple(f"blocks.{i}{INNER}".rstrip(".") for i in range(len(model.blocks)))
        former = {key: value.shape for key, value in weights.items()}
        if is_plain:
            weights = checkpoint_filter_fn(weights, model)
        left_out = load_weights(model, weights, path, skip=(*heads, *new))
    except ValueError as error:
        raise ConfigError(f"initial_weights: {error}; {whose(text)}") from error
    # Of a head of several layers zeros would stop the gradient.
    untrained = [key for key in left_out if key.rpartition(".")[0] in heads]
    with torch.no_grad():
        for key in untrained:
            model.get_parameter(key).zero_()
    interpolated = [key for key, value in weights.items() if former.get(key) != value.shape]
    taken = len(model.state_dict()) - len(left_out)
    parts = [f"{taken} tensors taken"]
    if interpolated:
        parts.append(f"{len(interpolated)} of them interpolated ({', '.join(interpolated)})")
    if untrained:
        parts.append(f"{len(untrained)} start at zero ({some(untrained)})")
    if random := [key for key in left_out if key not in untrained]:
        parts.append(f"{len(random)} left at random ({some(random)})")
    if without_place:
        parts.append(f"{len(without_place)} of the file left out ({some(without_place)})")
    own = _weights_of(name, model_args)
    another = f" Note: the model trained is {own.removeprefix('weights of ')}."
    message = f"starting from {path}, {source or 'which does not say whose weights it holds'}:"
    return f"{message} {', '.join(parts)}." + (another if source and source != own else "")


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's classifiers, as timm's description of it has them."""
    # Of a model of two heads, as timm's distilled ones are, it has a tuple.
    head = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    return (head,) if isinstance(head, str) else tuple(head)


def _weights_of(name: str, model_args: Mapping[str, Any]) -> str:
    return f"weights of {describe_model(name, model_args)}"


def whose(text: str | None) -> str:
    """Return a sentence on whose weights a file holds, by its metadata."""
    source = described(text)
    return f"the file holds {source}" if source else "the file does not say whose they are"


def trained_for(text: str | None) -> str | None:
    """Return the name of the task that a file's weights were trained for, by its metadata."""
    try:
        return read_json(text or "null")["task"]["name"]
    except (ValueError, KeyError, TypeError):  # nothing that this package wrote
        return None


def described(text: str | None) -> str | None:
    """Return whose weights a file holds, by its metadata; None where it does not say."""
    try:
        metadata = read_json(text or "null")
        if "state" in metadata:
            name = metadata["state"]["config"]["model"]["name"]
            return f"the state of a run of {name}, to be resumed"
        return _weights_of(metadata["model"], metadata["model_args"])
    except (ValueError, KeyError, TypeError, AttributeError):  # nothing that this package wrote
        return None
