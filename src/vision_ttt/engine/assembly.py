"""From a run's config to its parts: data, model, optimiser, each as one process needs it."""

from collections.abc import Callable
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
from vision_ttt.engine.building import build_model, data_config, load_weights, model_arguments
from vision_ttt.engine.config import TrainConfig
from vision_ttt.engine.freezing import freeze_layers
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
from vision_ttt.engine.seeds import seed_pass
from vision_ttt.engine.state import SavedRun, restore_moments
from vision_ttt.engine.step import Step
from vision_ttt.engine.tasks import Task, make_task
from vision_ttt.engine.tensor_files import read_tensors
from vision_ttt.models import Vittt
from vision_ttt.models.image_size import checkpoint_filter_fn

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
    """Constructor arguments that build the model again."""
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

    @property
    def evaluated(self) -> nn.Module:
        """What is evaluated and saved: the moving average where there is one."""
        return self.model if self.average is None else self.average.module


def assemble(
    config: TrainConfig,
    accelerator: Accelerator,
    saved: SavedRun | None,
    stop_vote: Callable[[], float],
) -> Parts:
    """Open the data, build the model and what trains it, as `saved` left them where it is given.

    Raises:
        ConfigError: the model, its arguments or weights do not fit, or cannot be divided.
        DatasetError, FileNotFoundError: the dataset cannot be used.
    """
    check_processes(config, accelerator)
    seed_pass((config.seed,))
    source = dataset_spec(config)
    data = open_dataset(source)
    model_args = model_arguments(
        config.model,
        num_classes=len(data.classes),
        image_size=config.image_size,
        extra=config.model_args,
    )
    model = _build(config, model_args, initialise=saved is None)
    task = make_task(config, model)
    model_input = data_config(model, config.image_size, config.crop_fraction)
    train_set, test_set = transformed(data, model_input, config)
    share = Share(accelerator.process_index, accelerator.num_processes)
    loaders = make_loaders(
        train_set, test_set, config, share=share, image_shape=model_input["input_size"]
    )
    if saved:
        load_weights(model, saved.model, "the checkpoint")
    model.to(accelerator.device)
    average = None
    if config.ema_decay > 0:
        average = ModelEmaV3(model, decay=config.ema_decay, use_warmup=True)
        if saved:
            load_weights(average.module, saved.average, "the checkpoint")
        if config.sharding == "sharded":
            share_model(average.module, accelerator, config.sharding)
    shared = share_model(model, accelerator, config.sharding)
    optimizer = make_optimizer(model, config)
    scheduler = make_scheduler(optimizer, config, loaders.updates_per_epoch)
    models = [model] if average is None else [model, average.module]
    warm_up_inner = make_inner_warmup(models, config, loaders.updates_per_epoch)
    if saved:
        restore_moments(model, optimizer, saved.moments)
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
        fixed_images=spread_images(test_set, _INNER_LOSS_IMAGES).to(accelerator.device),
    )


def _build(config: TrainConfig, model_args: dict[str, Any], *, initialise: bool) -> nn.Module:
    regularisation = {} if config.drop_path is None else {"drop_path_rate": config.drop_path}
    model = build_model(config.model, {**model_args, **regularisation})
    if config.initial_weights and initialise:
        weights, _ = read_tensors(Path(config.initial_weights))
        if isinstance(model, Vittt):
            weights = checkpoint_filter_fn(weights, model)  # they may be of another image size
        head = model.pretrained_cfg.get("classifier")
        load_weights(model, weights, config.initial_weights, skip=head)
    if config.gradient_checkpointing:
        model.set_grad_checkpointing(True)
    freeze_layers(model, config.frozen_layers)
    return model
