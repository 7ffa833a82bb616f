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
from torch.utils.data import Dataset

from vision_ttt.data import DatasetSpec, ImageSplits, Share, open_dataset
from vision_ttt.engine.building import (
    build_model,
    check_takes,
    data_config,
    describe_model,
    model_arguments,
    unfusable,
)
from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.freezing import freeze_layers
from vision_ttt.engine.initial_weights import start_from
from vision_ttt.engine.inputs import (
    Loaders,
    dataset_spec,
    make_loaders,
    mixing,
    spread_images,
    transformed,
)
from vision_ttt.engine.optimisation import make_inner_warmup, make_optimizer, make_scheduler
from vision_ttt.engine.parallel import check_processes, share_model
from vision_ttt.engine.run_directory import newest_whole
from vision_ttt.engine.seeds import seed_pass
from vision_ttt.engine.state import TrainState, restore
from vision_ttt.engine.step import Step
from vision_ttt.engine.tasks import Task, make_task

_LOGGER = logging.getLogger(__name__)
_INNER_LOSS_IMAGES = 32


@dataclass(frozen=True)
class Parts:
    """What a run consists of, in one process."""

    source: DatasetSpec
    data: ImageSplits
    train_set: Dataset
    test_set: Dataset
    loaders: Loaders
    model_args: dict[str, Any]
    """Constructor arguments of the model in training."""
    model_input: dict[str, Any]
    """timm's data config."""
    model: nn.Module
    average: ModelEmaV3 | None
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    warm_up_inner: Callable[[int], None]
    """Sets the inner learning rates of an update."""
    task: Task
    step: Step
    fixed_images: Tensor
    """Test images on which the inner loss is watched, [N, 3, H, W]."""
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
    """Open the data, build the model and what trains it, and say what is trained.

    Args:
        found: checkpoints of the run to go on with, newest first: all is as the newest whole one
            left it. None for a new run.

    Raises:
        ConfigError: the model, its arguments, weights or images do not fit, or cannot be divided;
            the checkpoints are of another config.
        DatasetError, FileNotFoundError: the dataset cannot be used.
        CheckpointError: none of the checkpoints is whole.
    """
    check_processes(config, accelerator)
    seed_pass((config.seed,))
    source = dataset_spec(config)
    data = open_dataset(source)
    if config.num_classes not in (None, len(data.classes)):
        raise ConfigError(
            f"num_classes is {config.num_classes}, but {config.dataset} has {len(data.classes)}"
            " classes; leave it out"
        )
    model_args = model_arguments(
        config.model,
        num_classes=len(data.classes),
        image_size=config.image_size,
        extra=config.model_args,
    )
    model, start = _build(config, model_args, initialise=not found)
    saved = None
    if found:
        saved = newest_whole(found, config, model, accelerator)
    task = make_task(config, model)
    model_input = data_config(model, config.image_size, config.crop_fraction)
    train_set, test_set = transformed(data, model_input, config)
    share = Share(accelerator.process_index, accelerator.num_processes)
    loaders = make_loaders(
        train_set, test_set, config, share=share, image_shape=model_input["input_size"]
    )
    model.to(accelerator.device)
    fixed_images = spread_images(test_set, _INNER_LOSS_IMAGES).to(accelerator.device)
    check_takes(model, fixed_images[:1])
    if accelerator.is_main_process:
        _say_what_is_trained(config, model, start)
    average = None
    if config.ema_decay > 0:
        average = ModelEmaV3(model, decay=config.ema_decay, use_warmup=True)
        if config.sharding == "sharded":
            share_model(average.module, accelerator, config.sharding)
    shared = share_model(model, accelerator, config.sharding)
    optimizer = make_optimizer(model, config)
    scheduler = make_scheduler(optimizer, config, loaders.updates_per_epoch)
    models = [model] if average is None else [model, average.module]
    warm_up_inner = make_inner_warmup(models, config, loaders.updates_per_epoch)
    if saved:
        restore(saved, model, None if average is None else average.module, optimizer)
        scheduler.step_update(saved.state.update - 1)  # the rate of the last update done
    warm_up_inner(max(saved.state.update - 1, 0) if saved else 0)
    mix = mixing(config, len(data.classes))
    return Parts(
        source=source,
        data=data,
        train_set=train_set,
        test_set=test_set,
        loaders=loaders,
        model_args=model_args,
        model_input=model_input,
        model=model,
        average=average,
        optimizer=optimizer,
        scheduler=scheduler,
        warm_up_inner=warm_up_inner,
        task=task,
        step=Step(config, accelerator, model, shared, optimizer, task, mix, stop_vote),
        fixed_images=fixed_images,
        state=saved.state if saved else TrainState(),
    )


def _build(
    config: TrainConfig, model_args: dict[str, Any], *, initialise: bool
) -> tuple[nn.Module, str]:
    """Build the model; return it with a line on the weights that it starts from, "" for none."""
    regularisation = {} if config.drop_path is None else {"drop_path_rate": config.drop_path}
    arguments = {**model_args, **regularisation}
    try:
        model = build_model(config.model, arguments)
    except ConfigError as error:
        raise ConfigError(f"{error}{unfusable(config.model, arguments)}") from error
    start = ""
    if config.initial_weights and initialise:
        start = start_from(Path(config.initial_weights), model, config.model, model_args)
    if config.gradient_checkpointing:
        try:
            model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError) as error:  # timm's models say so by either
            raise ConfigError(f"gradient_checkpointing: {config.model} has none") from error
    if config.layer_decay is not None and not hasattr(model, "group_matcher"):
        raise ConfigError(f"layer_decay: {config.model} does not tell its layers")
    freeze_layers(model, config.frozen_layers)
    return model, start


def _say_what_is_trained(config: TrainConfig, model: nn.Module, start: str) -> None:
    """Log the model with what was chosen for it, and the weights that it starts from."""
    chosen = dict(config.model_args)
    for name in ("image_size", "drop_path"):
        if getattr(config, name) is not None:
            chosen[name] = getattr(config, name)
    sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    frozen = sum(size for size, learns in sizes if not learns)
    _LOGGER.info(
        "training %s%s: %s parameters%s",
        describe_model(config.model, chosen),
        "" if chosen else " as it is by default",
        f"{sum(size for size, _ in sizes):,}",
        f", {frozen:,} of them frozen" if frozen else "",
    )
    if start:
        _LOGGER.info("%s", start)
