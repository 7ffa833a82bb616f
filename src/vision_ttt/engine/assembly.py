"""From a run's config to its parts: data, model, optimiser, each as one process needs it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from vision_ttt.acceleration.training import use_composite_ops
from vision_ttt.engine.building import describe_model
from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.freezing import freeze_layers
from vision_ttt.engine.initial_weights import timms_weights, weights_file
from vision_ttt.engine.loaders import Loaders, make_loaders
from vision_ttt.engine.optimisation import (
    Length,
    make_inner_warmup,
    make_optimizer,
    make_scheduler,
    new_parameters,
)
from vision_ttt.engine.parallel import check_processes, share_model
from vision_ttt.engine.run_directory import newest_whole
from vision_ttt.engine.state import TrainState, restore
from vision_ttt.engine.step import Step, seed_pass
from vision_ttt.engine.task import Task
from vision_ttt.models.linear_vit import NAME as LINEAR_VIT

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What a run consists of, in one process."""

    task: Task
    loaders: Loaders
    length: Length
    model_args: dict[str, Any]
    """Arguments that the task builds the model with, but for regularisation."""
    model: nn.Module
    average: ModelEmaV3 | None
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    warm_up_inner: Callable[[int], None]
    """Sets the inner learning rates of an update."""
    step: Step
    watched: Tensor | None
    """Inputs on which the inner loss is watched; None: it is not."""
    state: TrainState
    """How far the run has come."""

    @property
    def evaluated(self) -> nn.Module:
        """What is evaluated and saved: the moving average where there is one."""
        return self.model if self.average is None else self.average.module


def assemble(
    config: TrainConfig,
    accelerator: Accelerator,
    found: Sequence[Path],
    stop_vote: Callable[[], float],
) -> Parts:
    """Open the data, build the model and what trains it, and log what is trained.

    Args:
        found: checkpoints of the run to resume, newest first. The newest one that is whole is
            restored. Empty for a new run.

    Raises:
        ConfigError: the model, its arguments, weights or data do not fit, or cannot be divided;
            the checkpoints are of another config.
        UserError: as the task's, where its data cannot be used.
        CheckpointError: none of the checkpoints is whole.
    """
    check_processes(config, accelerator)
    seed_pass((config.run.seed,))
    task = config.task.open(config)
    model_args = task.model_arguments()
    model, start = _build(config, task, model_args, initialise=not found)
    saved = None
    if found:
        saved = newest_whole(found, config, model, accelerator)
    task.prepare(model)
    state = saved.state if saved else TrainState()
    _note_items(state, task)
    loaders = make_loaders(task, config, accelerator)
    model.to(accelerator.device)
    watched = task.watched()
    if accelerator.is_main_process:
        _log_what_is_trained(config, model, start)
    optimisation, sharding = config.optimisation, config.machine.sharding
    average = None
    if optimisation.ema_decay > 0:
        # Sharded weights and whole buffers cannot be averaged in one call.
        foreach = sharding != "sharded"
        average = moving_average(model, optimisation.ema_decay, foreach=foreach)
        if sharding == "sharded":
            share_model(average.module, accelerator, sharding)
    shared = share_model(model, accelerator, sharding)
    length = Length.of(optimisation, loaders.updates_per_epoch, task.units_per_item)
    optimizer = make_optimizer(model, optimisation)
    scheduler = make_scheduler(optimizer, optimisation, length)
    models = [model] if average is None else [model, average.module]
    warm_up_inner = make_inner_warmup(models, config, length)
    if saved:
        restore(saved, model, None if average is None else average.module, optimizer)
        scheduler.step_update(saved.state.update - 1)  # the rate of the last update done
    warm_up_inner(max(state.update - 1, 0))
    return Parts(
        task=task,
        loaders=loaders,
        length=length,
        model_args=model_args,
        model=model,
        average=average,
        optimizer=optimizer,
        scheduler=scheduler,
        warm_up_inner=warm_up_inner,
        step=Step(config, accelerator, model, shared, optimizer, task, stop_vote),
        watched=None if watched is None else watched.to(accelerator.device),
        state=state,
    )


def _note_items(state: TrainState, task: Task) -> None:
    """Note the number of training items, by which an epoch's order follows from the seed, and
    which items are held out for test.

    Raises:
        ConfigError: the run began with others.
    """
    count = len(task.train_set)
    if state.train_items not in (0, count):
        raise ConfigError(
            f"the run began with {state.train_items:,} training items, but the data now have"
            f" {count:,}; restore the data, or start another run with initial_weights"
        )
    held_out = task.carried().get("held_out", "")
    if state.held_out not in ("", held_out):
        raise ConfigError(
            "the run held out other items for test when it began, and has trained on some of the"
            " items that are held out now: items were renamed or exchanged; restore the data, or"
            " start another run with initial_weights"
        )
    state.train_items, state.held_out = count, held_out


def _build(
    config: TrainConfig, task: Task, model_args: dict[str, Any], *, initialise: bool
) -> tuple[nn.Module, str]:
    """Build the model; return it with a line on what it starts from, "" if it is resumed."""
    own = config.model
    regularisation = {} if own.drop_path is None else {"drop_path_rate": own.drop_path}
    arguments = {**model_args, **regularisation}
    model = task.build_model(own.name, arguments)
    start = ""
    if own.initial_weights and initialise:
        weights = weights_file(own.initial_weights)
        start = task.start_from(weights, model, own.name, model_args)
    elif initialise:
        start = "starting from random weights"
        name = own.arguments.get("base") if own.name == LINEAR_VIT else own.name
        if found := timms_weights(name or own.name):
            weights = f"{found.architecture}.{found.tag}"
            start += f"; --initial-weights {weights} downloads weights of timm"
    if config.machine.gradient_checkpointing:
        try:
            task.checkpoint_gradients(model)
        except (AttributeError, AssertionError) as error:  # timm's models say so by either
            raise ConfigError(f"gradient_checkpointing: {own.name} has none") from error
    if config.optimisation.layer_decay is not None and not hasattr(model, "group_matcher"):
        kind = type(model).__name__
        raise ConfigError(f"layer_decay: {kind} does not name its layers (group_matcher)")
    freeze_layers(model, own.frozen_layers)
    if config.machine.composite_ops and (left := use_composite_ops(model)):
        _LOGGER.info("without composite ops: %s", left)
    return model, start


def moving_average(model: nn.Module, decay: float, *, foreach: bool = True) -> ModelEmaV3:
    """Return the exponential moving average of a model's weights, tied ones included.

    timm averages all that the state dict names, hence a tied weight twice per update, unless it
    copies buffers. A model with tied weights has no buffers that training changes.
    """
    named = sum(1 for _ in model.named_parameters(remove_duplicate=False))
    tied = named > sum(1 for _ in model.parameters())
    return ModelEmaV3(model, decay=decay, use_warmup=True, foreach=foreach, exclude_buffers=tied)


def _log_what_is_trained(config: TrainConfig, model: nn.Module, start: str) -> None:
    """Log the model with what was chosen for it, and the weights that it starts from."""
    chosen = dict(config.model.arguments)
    if config.model.drop_path is not None:
        chosen["drop_path"] = config.model.drop_path
    sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    frozen = sum(size for size, learns in sizes if not learns)
    _LOGGER.info(
        "training %s%s: %s parameters%s",
        describe_model(config.model.name, chosen),
        "" if chosen else " as it is by default",
        f"{sum(size for size, _ in sizes):,}",
        f", {frozen:,} of them frozen" if frozen else "",
    )
    if (factor := config.optimisation.new_parameters_rate) != 1:
        count = sum(model.get_parameter(name).numel() for name in new_parameters(model))
        _LOGGER.info("%s new parameters learn at %g times the learning rate", f"{count:,}", factor)
    if start:
        _LOGGER.info("%s", start)
