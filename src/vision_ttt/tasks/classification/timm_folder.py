"""Classifiers that timm or transformers have saved: a folder of weights and their description."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from timm.data import resolve_data_config
from torch import Tensor

from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.described import read_json
from vision_ttt.engine.tensor_files import HUB_CONFIG, HUB_WEIGHTS, CheckpointError, read_tensors
from vision_ttt.file_kinds import read_regular

_LARGEST_CONFIG = 2**24  # bytes
_IN_TRANSFORMERS = "timm_model."


def is_timm_folder(path: Path) -> bool:
    """Whether a folder holds the description of a model of timm's form."""
    return (path / HUB_CONFIG).is_file()


def read_timm_folder(folder: Path) -> tuple[dict[str, Tensor], ModelMetadata]:
    """Return the weights and the metadata of a classifier in a folder.

    The folder is written by ``vision-ttt export``, by ``timm.models.save_for_hf``, or by
    ``save_pretrained`` of transformers. It does not describe the training. Classes without names
    are numbered.

    Raises:
        CheckpointError: the weights are missing, or no safetensors; a file is damaged, or describes
            no classifier of timm's registry.
    """
    config, file = folder / HUB_CONFIG, folder / HUB_WEIGHTS
    if not file.exists():
        raise CheckpointError(
            f"{folder} has no {HUB_WEIGHTS}; timm.models.save_for_hf writes it by"
            " safe_serialization=True"
        )
    weights, _ = read_tensors(file)
    weights = {key.removeprefix(_IN_TRANSFORMERS): value for key, value in weights.items()}
    sizes = {size for value in weights.values() for size in value.shape}
    try:
        return weights, _metadata(read_json(read_regular(config, _LARGEST_CONFIG)), sizes)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{config} describes no classifier of timm: {reason}") from error


def _metadata(described: dict[str, Any], sizes: Collection[int]) -> ModelMetadata:
    # Folders of early versions of timm have the description at the top.
    own = described.get("pretrained_cfg") or described
    count = described.get("num_classes", own.get("num_classes"))
    if type(count) is not int or count not in sizes:
        raise ValueError(f"num_classes is {count!r}, and no weight has that size")
    names = described.get("label_names") or own.get("label_names") or ()
    if isinstance(names, dict):
        names = [names.get(str(index), str(index)) for index in range(count)]
    # Given another number of classes, transformers keeps the names of the former ones.
    classes = names if len(names) == count else [str(index) for index in range(count)]
    arguments = {**(described.get("model_args") or {}), "num_classes": count}
    carried = {"classes": classes, "input": resolve_data_config(pretrained_cfg=own)}
    return ModelMetadata({"name": "classification"}, described["architecture"], arguments, carried)
