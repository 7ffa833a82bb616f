"""AdamW with decay groups, and a cosine schedule with warm-up, stepped per update; both timm's.

The inner learning rates' warm-up is ours.
"""

from collections.abc import Callable, Sequence

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.layers import TTTMLP, warm_up_inner_rates


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


def make_inner_warmup(
    models: Sequence[nn.Module], config: TrainConfig, updates_per_epoch: int
) -> Callable[[int], None]:
    """Return what sets the inner learning rates of update n in `models` (from 0).

    Raises:
        ConfigError: there is to be a warm-up, and no layer that has one.
    """
    if not config.inner_warmup_epochs:
        return lambda update: None
    if not any(isinstance(module, TTTMLP) for module in models[0].modules()):
        raise ConfigError(
            f"inner_warmup_epochs is {config.inner_warmup_epochs}; {config.model} as it is"
            " configured has no TTT-MLP layer, it must be 0"
        )
    updates = config.inner_warmup_epochs * updates_per_epoch

    def warm_up(update: int) -> None:
        for model in models:
            warm_up_inner_rates(model, min(1.0, update / updates))

    return warm_up
