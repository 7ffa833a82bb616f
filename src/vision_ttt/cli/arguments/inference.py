"""The arguments of every command that runs a checkpoint on images."""

from dataclasses import dataclass
from typing import Literal

from vision_ttt.cli.checks import LARGEST_BATCH
from vision_ttt.cli.parser import within
from vision_ttt.engine.config import MOST_WORKERS

CHECKPOINT = (
    "path of a last.safetensors, or of a folder with config.json and model.safetensors, to which"
    " vision-ttt export, timm or transformers has saved a classifier of timm's registry; or the"
    " name of packaged weights, as `vision-ttt models` lists them"
)
"""What a checkpoint may be, for help."""


@dataclass
class InferenceFlags:
    """How images are read and in which precision the model computes."""

    batch_size: int = within(64, 1, LARGEST_BATCH)
    """images per forward pass"""
    num_workers: int = within(0, 0, MOST_WORKERS)
    """processes that decode images"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of weights and activations; bfloat16 is faster on processors that multiply it"""
    skip_bad: bool = False
    """skip, name and count images that do not decode; otherwise stop"""


@dataclass
class DeviceFlag:
    """Where the model runs."""

    device: str | None = None
    """cpu, cuda, cuda:1, …; null: a GPU if there is one"""


@dataclass
class JsonFlag:
    """The form of the output."""

    json: bool = False
    """print JSON instead of tables"""
