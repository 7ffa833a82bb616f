"""AdamW with decay groups, and schedules with warm-up, stepped per update; both timm's.

The inner learning rates' warm-up is ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from vision_ttt.engine.config import ConfigError, OptimisationSection, TrainConfig
from vision_ttt.layers import TTTMLP, warm_up_inner_rates


@dataclass(frozen=True)
class Length:
    """How long a run is, in optimiser updates."""

    updates: int
    """Altogether."""
    warmup: float
    """Of them in the warm-up."""
    inner_warmup: float
    """Of them in the warm-up of the inner learning rates."""
    decay_at: tuple[float, ...]
    """Updates after which the learning rate makes a step."""

    @classmethod
    def of(
        cls, optimisation: OptimisationSection, updates_per_epoch: int, units_per_item: int
    ) -> "Length":
        """Return the length of a run that the config gives in epochs, updates or units."""
        unit, length = optimisation.length
        # Updates, and the units that they are. Both are whole: a quotient would be rounded.
        updates, units = {
            "epochs": (updates_per_epoch, 1),
            "updates": (1, 1),
            "units": (1, optimisation.batch_size * units_per_item),
        }[unit]
        return cls(
            updates=-(-length * updates // units),
            warmup=optimisation.warmup * updates / units,
            inner_warmup=optimisation.inner_warmup * updates / units,
            decay_at=tuple(point * updates / units for point in optimisation.decay_at),
        )


def make_optimizer(model: nn.Module, optimisation: OptimisationSection) -> torch.optim.Optimizer:
    """Return AdamW over `model`'s parameters.

    No weight decay on one-dimensional parameters (biases, norms), nor on those that
    `model.no_weight_decay()` names. With `layer_decay` each layer of `model.group_matcher()` has
    its own learning rate, and so have the parameters of :func:`new_parameters` with
    `new_parameters_rate`.

    Raises:
        ConfigError: there is such a rate, and the model has no new parameters.
    """
    optimizer = create_optimizer_v2(
        model,
        opt="adamw",
        lr=optimisation.learning_rate,
        weight_decay=optimisation.weight_decay,
        layer_decay=optimisation.layer_decay,
        betas=(optimisation.beta1, optimisation.beta2),
    )
    factor = optimisation.new_parameters_rate
    if factor == 1:
        return optimizer
    new = {id(model.get_parameter(name)) for name in new_parameters(model)}
    if not new:
        raise ConfigError(
            f"new_parameters_rate is {factor}; it must be 1, because the model has no new"
            " parameters; only linear_vit has some"
        )
    for group in list(optimizer.param_groups):
        faster = [each for each in group["params"] if id(each) in new]
        if faster:
            group["params"] = [each for each in group["params"] if id(each) not in new]
            scale = factor * group.get("lr_scale", 1.0)  # by which timm's schedules multiply
            optimizer.param_groups.append({**group, "params": faster, "lr_scale": scale})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def new_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that modules of `model` call new.

    A module names them in a method `new_parameters() -> set[str]`: the parameters for which there
    are no initial weights.
    """
    return {
        f"{name}.{parameter}" if name else parameter
        for name, module in model.named_modules()
        if hasattr(module, "new_parameters")
        for parameter in module.new_parameters()
    }


def make_scheduler(
    optimizer: torch.optim.Optimizer, optimisation: OptimisationSection, length: Length
) -> Scheduler:
    """Return the schedule; `scheduler.step_update(n)` sets update n's learning rate (from 0)."""
    names = {"cosine": "cosine", "polynomial": "poly", "steps": "multistep"}
    polynomial = optimisation.schedule == "polynomial"
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=names[optimisation.schedule],
        # timm lowers the rate one update before a milestone, and reads a power as a rate.
        decay_milestones=[point + 1 for point in length.decay_at],
        decay_rate=optimisation.power if polynomial else optimisation.decay_rate,
        num_epochs=length.updates,
        min_lr=optimisation.minimum_learning_rate,
        warmup_lr=optimisation.warmup_learning_rate,
        warmup_epochs=length.warmup,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return scheduler


def make_inner_warmup(
    models: Sequence[nn.Module], config: TrainConfig, length: Length
) -> Callable[[int], None]:
    """Return what sets the inner learning rates of update n in `models` (from 0).

    Raises:
        ConfigError: there is to be a warm-up, and no layer that has one.
    """
    if not length.inner_warmup:
        return lambda update: None
    if not any(isinstance(module, TTTMLP) for module in models[0].modules()):
        raise ConfigError(
            f"inner_warmup is {config.optimisation.inner_warmup}; {config.model.name} as it is"
            " configured has no TTT-MLP layer, it must be 0"
        )

    def warm_up(update: int) -> None:
        for model in models:
            warm_up_inner_rates(model, min(1.0, update / length.inner_warmup))

    return warm_up
