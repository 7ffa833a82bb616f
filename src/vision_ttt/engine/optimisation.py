"""AdamW with decay groups, and a cosine schedule with warm-up, stepped per update; both timm's."""

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from vision_ttt.engine.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW over `model`'s parameters.

    No weight decay on one-dimensional parameters (biases, norms), nor on those that
    `model.no_weight_decay()` names. With `layer_decay` each layer of `model.group_matcher()` has
    its own learning rate.
    """
    return create_optimizer_v2(
        model,
        opt="adamw",
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        layer_decay=config.layer_decay,
        betas=(config.beta1, config.beta2),
    )


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: TrainConfig, updates_per_epoch: int
) -> Scheduler:
    """Return the schedule; `scheduler.step_update(n)` sets update n's learning rate (from 0)."""
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=config.epochs,
        min_lr=config.minimum_learning_rate,
        warmup_lr=config.warmup_learning_rate,
        warmup_epochs=config.warmup_epochs,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )
    return scheduler
