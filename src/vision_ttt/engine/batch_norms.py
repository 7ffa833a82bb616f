"""Batch norms of one value per channel, which has no variance: PyTorch's fail at the first step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.freezing import training_mode
from vision_ttt.engine.task import Task


def check_single_items(model: nn.Module, task: Task) -> None:
    """Check that a model on the CPU can be trained on one item at a time; leave it training.

    Nothing is checked where the task makes no example of the model's input.

    Raises:
        ConfigError: a batch norm would have one value per channel.
    """
    training_mode(model)
    named = model.named_modules()
    norms = {name: each for name, each in named if isinstance(each, _BatchNorm) and each.training}
    if not norms:
        return
    try:
        example = task.example()
    except NotImplementedError:
        return
    alone: list[str] = []

    def look(name: str, _: nn.Module, inputs: tuple[Tensor]) -> None:
        if inputs[0].numel() == inputs[0].shape[1]:
            alone.append(name)

    handles = [norm.register_forward_pre_hook(partial(look, name)) for name, norm in norms.items()]
    model.eval()  # so that the pass does not fail itself, nor changes running statistics
    with torch.no_grad():
        model(example)
    training_mode(model)
    for handle in handles:
        handle.remove()
    if alone:
        raise ConfigError(
            "batch_size / accumulation_steps / processes is 1; it must be at least 2, as"
            f" {alone[0]} of {type(model).__name__} is a batch norm, and one item gives it one"
            " value per channel"
        )
