"""Reading of the files in which authors release weights."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import torch
from torch import Tensor

from vision_ttt.convert.family import ConversionError
from vision_ttt.engine.tensor_files import read_tensors
from vision_ttt.file_kinds import UnreadableFile, check_regular

# Keys of the weights in a training checkpoint. A moving average takes precedence.
_NESTED = ("ema", "model", "state_dict")
_WRAPPED = "module."  # the prefix that data-parallel training adds to every key
_REASON = "WeightsUnpickler error: "  # before what PyTorch could not read


def read_release(path: str | Path) -> dict[str, Tensor]:
    """Read the state dict of a .safetensors file or of a file of ``torch.save``, on the CPU.

    A pickle is read with ``weights_only=True``, which runs no code. The weights may be nested under
    the key "ema", the moving average of DiT's training, "model" or, as mmdet and mmseg do,
    "state_dict", and every name may begin with "module.".

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: a .safetensors file is damaged.
        ConversionError: another file cannot be read, or holds other objects than tensors, or no
            weights.
    """
    path = Path(path)
    try:
        check_regular(path)
    except UnreadableFile as error:
        raise ConversionError(str(error)) from error
    if path.suffix == ".safetensors":
        content, _ = read_tensors(path)
    else:
        content = _unpickle(path)
    for nested in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(nested), dict):
            content = content[nested]
    weights = content if isinstance(content, dict) else {}
    named = all(isinstance(k, str) and isinstance(v, Tensor) for k, v in weights.items())
    if not weights or not named:
        raise ConversionError(
            f"{path} holds no weights: a mapping of names to tensors"
            + "".join(f', or one under "{name}"' for name in _NESTED)
            + ", is accepted"
        )
    if all(name.startswith(_WRAPPED) for name in weights):
        return {name.removeprefix(_WRAPPED): value for name, value in weights.items()}
    return dict(weights)


def _unpickle(path: Path) -> object:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # training arguments
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # The rest advises how to load the file regardless.
        reason = str(error).partition(_REASON)[2].partition(". Please ")[0] or type(error).__name__
        raise ConversionError(
            f"{path} is no file of torch.save, or holds objects that could run code, and these are "
            f"not loaded ({reason}); save its state dict alone and convert that"
        ) from error
    except Exception as error:  # a file that is not a pickle can raise any error
        raise ConversionError(f"{path} is truncated or no file of torch.save: {error}") from error
