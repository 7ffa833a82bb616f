"""The training loop, to be read from top to bottom."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from torch import nn
from torch.utils.data import Dataset

from vision_ttt.data import DatasetError, ImageSplits
from vision_ttt.engine.assembly import Parts, assemble
from vision_ttt.engine.checkpoint import BEST_FILE, WEIGHTS_FILE, ModelMetadata, save_weights
from vision_ttt.engine.config import TrainConfig
from vision_ttt.engine.evaluate import BadImages, Evaluation
from vision_ttt.engine.faults import StopRequest, stop_on_signals
from vision_ttt.engine.freezing import training_mode
from vision_ttt.engine.logs import open_log
from vision_ttt.engine.metrics import (
    end_epoch,
    epoch_line,
    inner_loss_reduction,
    is_best,
    largest_rate,
    summary,
    timed,
)
from vision_ttt.engine.non_finite import refuse_or_skip
from vision_ttt.engine.parallel import (
    all_names,
    failing_together,
    make_accelerator,
    summed,
    unshared,
)
from vision_ttt.engine.run_directory import (
    Resume,
    begin_directory,
    only_run,
    open_run,
    save_checkpoint,
)
from vision_ttt.engine.state import SavedRun, TrainState, optimizer_moments
from vision_ttt.engine.tasks import TestResult
from vision_ttt.explain import inner_losses
from vision_ttt.layers import unfuse

if TYPE_CHECKING:  # it needs diffusers
    from vision_ttt.engine.denoising import DenoisingEvaluation

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves."""

    run_dir: Path
    """Holds config.yaml, environment.json, metrics.*, tensorboard/, checkpoints/, last.safetensors
    and best.safetensors."""
    metrics: dict[str, Any]
    """The content of metrics.json."""
    model: nn.Module
    """The trained model (the moving average where there is one), in evaluation mode."""
    evaluation: Evaluation | DenoisingEvaluation
    """On the test images, after the last epoch; the latter of a diffusion model."""
    classes: tuple[str, ...]
    """Class names, by index."""
    test_images: Dataset
    """The test set as the model sees it: items (image [3, H, W], class index, index)."""
    data: ImageSplits
    """Both parts of the dataset as PIL images."""
    input: dict[str, Any]
    """timm's data config: input_size, mean, std, …"""
    is_main: bool
    """Whether this process, of several, is the one to write and to speak."""


def train(
    config: TrainConfig,
    *,
    resume: Resume = False,
    overwrite: bool = False,
    progress: bool = False,
) -> TrainResult:
    """Train by `config` and evaluate, leaving everything in the run directory `config.output`.

    Args:
        resume: go on with the run in that directory, exactly as if it had not been interrupted,
            from its newest checkpoint that is whole; "auto": if there is one, else start.
        overwrite: start anew though the directory holds a run, which moves to its sub-folder
            former.
        progress: show a progress bar on stderr.

    Raises:
        ConfigError: the model, its arguments, weights or images do not fit; the directory holds a
            run and neither `resume` nor `overwrite` is set; `resume` with another config; another
            run is at work in the directory.
        DatasetError, FileNotFoundError: the dataset cannot be used.
        CheckpointError: no checkpoint to resume from is whole.
        ImageError: an image does not decode, and `config.skip_bad` is off.
        LoaderError: the processes that load images hang or died.
        NonFiniteError: NaN or infinity; the last checkpoint is kept.
        Interrupted: Ctrl-C, or as its subclass Preempted SIGTERM; a checkpoint was written at that
            update.
        OSError: a full disk; the last checkpoint is kept.
    """
    run_dir = Path(config.output)
    with stop_on_signals() as stop:
        accelerator = make_accelerator(config.accumulation_steps)
        with only_run(run_dir, accelerator):
            found = open_run(config, resume=resume, overwrite=overwrite)
            parts = assemble(config, accelerator, found, lambda: stop.vote)
            state = parts.state
            state.config = asdict(config)
            # Only now that everything above is known to fit, and that every process has read it.
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                begin_directory(run_dir, config, accelerator.device, anew=overwrite)
            run = _Run(config, accelerator, state, parts, run_dir, stop)
            evaluation = run.train(progress)
            model = unshared(parts.evaluated, config.model, parts.model_args)
            unfuse(model)
    return TrainResult(
        run_dir=run_dir,
        metrics=summary(config, state, parts.data, parts.model),
        model=model.eval(),
        evaluation=evaluation,
        classes=parts.data.classes,
        test_images=parts.test_set,
        data=parts.data,
        input=parts.model_input,
        is_main=accelerator.is_main_process,
    )


@dataclass
class _Run:
    """The loop with what it works on."""

    config: TrainConfig
    accelerator: Accelerator
    state: TrainState
    parts: Parts
    run_dir: Path
    stop: StopRequest

    def train(self, progress: bool) -> TestResult:
        """Train the epochs that are left; return the last one's evaluation."""
        config, state, parts = self.config, self.state, self.parts
        bad_images = BadImages(config.skip_bad, state.bad_images)
        updates = config.epochs * parts.loaders.updates_per_epoch
        evaluation = None
        with open_log(self.run_dir, config, self.accelerator, state, updates, progress) as log:
            log.inner_loss(inner_loss_reduction(self._inner_losses()))
            while state.epoch < config.epochs:
                training_mode(parts.model)
                started = time.perf_counter() - state.epoch_seconds
                batches = parts.loaders.updates(state.epoch, done=state.position)
                for update in timed(batches, state):
                    for batch in update:
                        bad_images.check(batch)
                    parts.scheduler.step_update(state.update)
                    parts.warm_up_inner(state.update)
                    first_pass = state.position * config.accumulation_steps
                    outcome = parts.step(update, state.epoch, first_pass)
                    if outcome.finite:
                        state.loss_sum += outcome.loss_sum
                        state.loss_images += outcome.images
                    else:
                        refuse_or_skip(outcome, parts, config, state, self.accelerator)
                    state.images += outcome.images
                    state.update += 1
                    state.position += 1
                    state.epoch_seconds = time.perf_counter() - started
                    if parts.average is not None and outcome.finite:
                        parts.average.update(parts.model, step=state.update)
                    log.update(state, outcome, largest_rate(parts.optimizer))
                    if outcome.stop_votes:
                        self._end(outcome.stop_votes)
                    if config.checkpoint_every and state.update % config.checkpoint_every == 0:
                        self._checkpoint()

                if not state.images:
                    raise DatasetError("not one image of the training set decodes")
                evaluation = self._evaluate(bad_images)
                state.bad_images[:] = all_names(state.bad_images, self.accelerator)
                losses = self._inner_losses()
                end_epoch(state, evaluation, losses, parts.optimizer, self.accelerator.device)
                self._checkpoint()
                log.epoch(state.history, summary(config, state, parts.data, parts.model))
                if self.accelerator.is_main_process:
                    _LOGGER.info(epoch_line(state, config))

            if evaluation is None:  # resumed after its last epoch
                evaluation = self._evaluate(bad_images)
        return evaluation

    def _inner_losses(self) -> dict[str, Any]:
        return inner_losses(self.parts.evaluated, self.parts.fixed_images)

    def _evaluate(self, bad_images: BadImages) -> TestResult:
        def between() -> None:
            (votes,) = summed([self.stop.vote], self.accelerator)
            if votes:
                self._end(votes)

        return self.parts.task.evaluate(
            self.parts.evaluated,
            self.parts.loaders.test,
            self.accelerator,
            bad_images=bad_images,
            between=between,
        )

    def _checkpoint(self) -> None:
        """Write the weights, then the state: what it counts lies on the disk when it is there."""
        state, parts = self.state, self.parts
        weights = parts.evaluated.state_dict()
        saved = SavedRun(
            state,
            parts.model.state_dict(),
            {} if parts.average is None else weights,
            optimizer_moments(parts.model, parts.optimizer),
        )
        metadata = ModelMetadata(
            model=self.config.model,
            model_args=parts.model_args,
            classes=parts.data.classes,
            input=parts.model_input,
            dataset=asdict(parts.source),
            epoch=state.epoch,
            update=state.update,
            averaged=parts.average is not None,
            diffusion=parts.task.diffusion,
            test_accuracy=state.history[-1]["test_accuracy"] if state.history else None,
        )
        writes = self.accelerator.is_main_process
        for name in (BEST_FILE, WEIGHTS_FILE) if is_best(state) else (WEIGHTS_FILE,):
            with failing_together(self.accelerator):
                save_weights(self.run_dir / name, weights, metadata, writes=writes)
        save_checkpoint(self.run_dir, saved, self.config.keep_checkpoints, self.accelerator)

    def _end(self, votes: float) -> None:
        """Write a checkpoint and end the run there, as the request to stop asks.

        Raises:
            Interrupted: always.
        """
        self._checkpoint()
        raise self.stop.error(
            votes,
            f"stopped after update {self.state.update} (epoch {self.state.epoch + 1});"
            f" {self.run_dir / WEIGHTS_FILE} is complete. Resume with:"
            f" vision-ttt train {self.run_dir / 'config.yaml'} --resume",
        )
