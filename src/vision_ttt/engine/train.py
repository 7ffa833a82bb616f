"""The training loop, to be read from top to bottom."""

import itertools
import json
import logging
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import Dataset, IterableDataset

from vision_ttt.data import (
    DatasetError,
    EpochOrder,
    ImageSplits,
    make_loader,
    open_dataset,
)
from vision_ttt.engine.building import build_model, data_config, load_weights, model_arguments
from vision_ttt.engine.checkpoint import (
    STATE_FILE,
    WEIGHTS_FILE,
    ModelMetadata,
    TrainState,
    read_state,
    read_weights,
    save_state,
    save_weights,
)
from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.evaluate import BadImages, Evaluation, autocast, evaluate
from vision_ttt.engine.faults import NonFiniteError, find_non_finite, stop_on_interrupt
from vision_ttt.engine.files import write_text
from vision_ttt.engine.inputs import (
    count_updates,
    dataset_spec,
    mixing,
    spread_images,
    transformed,
)
from vision_ttt.engine.logs import RunLog, environment
from vision_ttt.engine.metrics import end_epoch, epoch_line, largest_rate, summary
from vision_ttt.engine.optimisation import make_optimizer, make_scheduler
from vision_ttt.engine.seeds import seed_pass
from vision_ttt.errors import Interrupted
from vision_ttt.explain import inner_losses
from vision_ttt.models import Vittt
from vision_ttt.models.image_size import checkpoint_filter_fn

_LOGGER = logging.getLogger(__name__)
_INNER_LOSS_IMAGES = 32
FORMER = "former"
"""Sub-folder of a run directory for what an overwritten run left."""
# What a resumed run may change without becoming another run.
_FREE_FIELDS = {"output", "num_workers", "skip_bad"}


@dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves."""

    run_dir: Path
    """Holds config.yaml, environment.json, metrics.*, tensorboard/ and last.*, the checkpoint."""
    metrics: dict[str, Any]
    """The content of metrics.json."""
    model: nn.Module
    """The trained model (the moving average where there is one), in evaluation mode."""
    evaluation: Evaluation
    """On the test images, after the last epoch."""
    classes: tuple[str, ...]
    """Class names, by index."""
    test_images: Dataset
    """The test set as the model sees it: items (image [3, H, W], class index)."""
    data: ImageSplits
    """Both parts of the dataset as PIL images."""
    input: dict[str, Any]
    """timm's data config: input_size, mean, std, …"""


def train(
    config: TrainConfig, *, resume: bool = False, overwrite: bool = False, progress: bool = False
) -> TrainResult:
    """Train by `config` and evaluate, leaving everything in the run directory `config.output`.

    Args:
        resume: go on with the run in that directory, exactly as if it had not been interrupted.
        overwrite: start anew though the directory holds a run, which moves to its sub-folder
            former.
        progress: show a progress bar on stderr.

    Raises:
        ConfigError: the model, its arguments or weights do not fit; the directory holds a run and
            neither `resume` nor `overwrite` is set; `resume` with another config.
        DatasetError, FileNotFoundError: the dataset cannot be used.
        ImageError: an image does not decode, and `config.skip_bad` is off.
        NonFiniteError: NaN or infinity; the last checkpoint is kept.
        Interrupted: Ctrl-C; a checkpoint was written at that update.
        OSError: a full disk; the last checkpoint is kept.
    """
    # 1. Where the run stands
    run_dir = Path(config.output)
    saved = _read_run(run_dir, config, resume=resume, overwrite=overwrite)
    state = saved["state"] if saved else TrainState()
    state.config = asdict(config)

    # 2. Data and model
    accelerator = Accelerator(
        gradient_accumulation_steps=config.accumulation_steps,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    seed_pass((config.seed,))
    source = dataset_spec(config)
    data = open_dataset(source)
    arguments = model_arguments(
        config.model,
        num_classes=len(data.classes),
        image_size=config.image_size,
        extra=config.model_args,
    )
    regularisation = {} if config.drop_path is None else {"drop_path_rate": config.drop_path}
    model = build_model(config.model, {**arguments, **regularisation})
    if config.initial_weights and not saved:
        weights, _ = read_weights(config.initial_weights)
        if isinstance(model, Vittt):
            weights = checkpoint_filter_fn(weights, model)  # they may be of another image size
        head = model.pretrained_cfg.get("classifier")
        load_weights(model, weights, config.initial_weights, skip=head)
    if config.gradient_checkpointing:
        model.set_grad_checkpointing(True)
    model_input = data_config(model, config.image_size, config.crop_fraction)
    train_set, test_set = transformed(data, model_input, config)
    updates_per_epoch = count_updates(train_set, config)
    updates = config.epochs * updates_per_epoch
    order = None
    if not isinstance(train_set, IterableDataset):
        taken = updates_per_epoch * config.batch_size
        order = EpochOrder(len(train_set), taken, config.seed)
    train_loader = make_loader(
        train_set,
        config.micro_batch_size,
        num_workers=config.num_workers,
        order=order,
        seed=config.seed,
    )
    test_loader = make_loader(test_set, config.micro_batch_size, num_workers=config.num_workers)
    mix = mixing(config, len(data.classes))
    smoothing = 0.0 if mix else config.label_smoothing  # mixing smooths its labels itself

    # 3. Optimisation
    optimizer = make_optimizer(model, config)
    scheduler = make_scheduler(optimizer, config, updates_per_epoch)
    if saved:
        load_weights(model, saved["model"], run_dir / STATE_FILE)
        optimizer.load_state_dict(saved["optimizer"])
    model.to(accelerator.device)
    average = None
    if config.ema_decay > 0:
        average = ModelEmaV3(model, decay=config.ema_decay, use_warmup=True)
        if saved:
            load_weights(average.module, saved["average"], run_dir / STATE_FILE)
    evaluated = model if average is None else average.module
    prepared, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    forward = torch.compile(prepared) if config.compile else prepared
    bad_images = BadImages(config.skip_bad, state.bad_images)
    fixed_images = spread_images(test_set, _INNER_LOSS_IMAGES).to(accelerator.device)

    # 4. The run directory, only now that everything above is known to fit
    run_dir.mkdir(parents=True, exist_ok=True)
    if overwrite:
        _set_aside(run_dir)
    _write_description(run_dir, config, accelerator.device)

    def checkpoint() -> None:
        if not accelerator.is_main_process:
            return
        metadata = ModelMetadata(
            model=config.model,
            model_args=arguments,
            classes=data.classes,
            input=model_input,
            dataset=asdict(source),
            epoch=state.epoch,
            update=state.update,
            averaged=average is not None,
            test_accuracy=state.history[-1]["test_accuracy"] if state.history else None,
        )
        save_state(run_dir / STATE_FILE, state, model, optimizer, average and average.module)
        save_weights(run_dir / WEIGHTS_FILE, evaluated.state_dict(), metadata)

    # 5. The loop
    evaluation = None
    with (
        RunLog(run_dir, first_update=state.update, show_progress=progress) as log,
        stop_on_interrupt() as stop,
    ):
        while state.epoch < config.epochs:
            train_set.epoch = state.epoch
            done = state.position * config.accumulation_steps  # forward passes of this epoch
            if order is not None:
                order.begin(state.epoch, skipped=done * config.micro_batch_size)
                batches = iter(train_loader)
            else:
                total = updates_per_epoch * config.accumulation_steps
                batches = itertools.islice(train_loader, done, total)
            started = time.perf_counter() - state.epoch_seconds
            prepared.train()

            for number, batch in enumerate(batches, start=done):
                bad_images.check(batch)
                # The randomness of a forward pass follows from its place in the run, so that a
                # resumed run needs no generator's state.
                place = (config.seed, state.epoch, number, accelerator.process_index)
                seed_pass(place)
                images, targets = batch["images"], batch["targets"]
                if mix is not None:
                    even = len(images) // 2 * 2  # a bad image may have left an odd number
                    images, targets = images[:even], targets[:even]
                    if even:
                        images, targets = mix(images, targets)
                scheduler.step_update(state.update)
                with accelerator.accumulate(prepared):
                    loss_value = 0.0
                    if len(images):  # bad images may have left none
                        with autocast(accelerator.device, config.precision):
                            logits = forward(images)
                        loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
                        accelerator.backward(loss)
                        loss_value = loss.item()
                    finite = math.isfinite(loss_value)
                    if accelerator.sync_gradients and finite:
                        gradients = [p.grad for p in model.parameters() if p.grad is not None]
                        norm = get_total_norm(gradients)
                        finite = math.isfinite(norm_value := norm.item())
                        if config.clip_norm > 0 and finite:
                            clip_grads_with_norm_(model.parameters(), config.clip_norm, norm)
                    if not finite:
                        # Before the step: neither the weights nor a checkpoint gets to see it.
                        raise _non_finite(model, images, place, state, config)
                    optimizer.step()
                    optimizer.zero_grad()
                state.loss_sum += loss_value * len(images)
                state.images += len(images)
                if not accelerator.sync_gradients:
                    continue

                state.update += 1
                state.position += 1
                state.epoch_seconds = time.perf_counter() - started
                if average is not None:
                    average.update(model, step=state.update)
                log.update(
                    epoch=state.epoch,
                    epochs=config.epochs,
                    update=state.update,
                    updates=updates,
                    loss=loss_value,
                    learning_rate=largest_rate(optimizer),
                    gradient_norm=norm_value,
                    images_per_second=state.images / state.epoch_seconds,
                )
                if stop.made:
                    checkpoint()
                    raise Interrupted(_how_to_resume(run_dir, state))

            if not state.images:
                raise DatasetError("not one image of the training set decodes")
            evaluation = evaluate(
                evaluated,
                test_loader,
                accelerator,
                bad_images=bad_images,
                precision=config.precision,
            )
            end_epoch(state, evaluation, inner_losses(evaluated, fixed_images), optimizer)
            checkpoint()
            log.epoch(state.history, summary(config, state, data, model))
            _LOGGER.info(epoch_line(state, config))
            if stop.made and state.epoch < config.epochs:
                raise Interrupted(_how_to_resume(run_dir, state))

    if evaluation is None:  # resumed after its last epoch
        evaluation = evaluate(
            evaluated, test_loader, accelerator, bad_images=bad_images, precision=config.precision
        )
    return TrainResult(
        run_dir=run_dir,
        metrics=summary(config, state, data, model),
        model=evaluated.eval(),
        evaluation=evaluation,
        classes=data.classes,
        test_images=test_set,
        data=data,
        input=model_input,
    )


def _read_run(
    run_dir: Path, config: TrainConfig, *, resume: bool, overwrite: bool
) -> dict[str, Any] | None:
    path = run_dir / STATE_FILE
    if resume and overwrite:
        raise ConfigError("resume and overwrite exclude each other; choose one")
    if resume:
        saved = read_state(path)
        former, now = saved["state"].config, asdict(config)
        changed = [
            f"{name} {former.get(name)!r} -> {value!r}"
            for name, value in now.items()
            if former.get(name) != value and name not in _FREE_FIELDS
        ]
        if changed:
            raise ConfigError(
                f"{run_dir} cannot be resumed with another config: {', '.join(changed)}"
            )
        return saved
    if path.exists() and not overwrite:
        raise ConfigError(
            f"{run_dir} already holds a run: resume it, overwrite it, or choose another output"
        )
    return None


def _set_aside(run_dir: Path) -> None:
    """Move what a former run left into the sub-folder former: none of it is lost should this one
    fail, nor passes for this one's. What lay in former before goes.
    """
    left = [entry for entry in run_dir.iterdir() if entry.name != FORMER]
    if not left:
        return
    former = run_dir / FORMER
    if former.exists():
        shutil.rmtree(former)
    former.mkdir()
    for entry in left:
        entry.rename(former / entry.name)


def _write_description(run_dir: Path, config: TrainConfig, device: torch.device) -> None:
    header = "# The run's whole configuration; a recipe like any other.\n"
    text = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)
    write_text(run_dir / "config.yaml", header + text)
    write_text(run_dir / "environment.json", json.dumps(environment(device), indent=2) + "\n")


def _non_finite(
    model: nn.Module,
    images: Tensor,
    place: tuple[int, ...],
    state: TrainState,
    config: TrainConfig,
) -> NonFiniteError:
    def again() -> None:
        seed_pass(place)
        with autocast(images.device, config.precision):
            model(images)

    where = find_non_finite(model, again, images)
    kept = Path(config.output) / WEIGHTS_FILE
    checkpoint = f"the last checkpoint is {kept}" if kept.exists() else "there is no checkpoint yet"
    return NonFiniteError(state.update, state.epoch, where, checkpoint)


def _how_to_resume(run_dir: Path, state: TrainState) -> str:
    return (
        f"stopped after update {state.update} (epoch {state.epoch + 1}); {run_dir / WEIGHTS_FILE}"
        f" is complete. Resume with: vision-ttt train {run_dir / 'config.yaml'} --resume"
    )
