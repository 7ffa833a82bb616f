"""The training loop, to be read from top to bottom."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from vision_ttt.acceleration import to_plain
from vision_ttt.data import DatasetError
from vision_ttt.engine.assembly import Parts, assemble
from vision_ttt.engine.checkpoint import BEST_FILE, WEIGHTS_FILE, ModelMetadata, save_weights
from vision_ttt.engine.config import TrainConfig
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.freezing import training_mode
from vision_ttt.engine.logs import RunLog
from vision_ttt.engine.metrics import (
    add_row,
    inner_loss_reduction,
    is_best,
    largest_rate,
    row_line,
    summary,
    timed,
)
from vision_ttt.engine.non_finite import refuse_or_skip
from vision_ttt.engine.parallel import (
    all_names,
    failing_together,
    make_accelerator,
    share_buffers,
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
from vision_ttt.engine.stopping import StopRequest, stop_on_signals
from vision_ttt.engine.task import Batch, Evaluation, Moment, Task
from vision_ttt.errors import dead_workers_named
from vision_ttt.explain import inner_losses
from vision_ttt.freed_memory import keep_freed_memory

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves."""

    run_dir: Path
    """Holds config.yaml, environment.json, metrics.*, tensorboard/, checkpoints/, last.safetensors
    and best.safetensors."""
    config: TrainConfig
    """Of the run."""
    metrics: dict[str, Any]
    """The content of metrics.json."""
    model: nn.Module
    """The trained model (the moving average where there is one), in evaluation mode."""
    evaluation: Evaluation
    """On the test data, at the run's end; of the task's own class."""
    task: Task
    """With its data."""
    is_main: bool
    """Whether this process, of several, is the one that writes and logs."""


def train(
    config: TrainConfig,
    *,
    resume: Resume = False,
    overwrite: bool = False,
    progress: bool = False,
) -> TrainResult:
    """Train by `config` and evaluate, leaving everything in the run directory `config.run.output`.

    Args:
        resume: resume the run in that directory from its newest whole checkpoint, exactly as if it
            had not been interrupted; "auto": resume if there is a checkpoint, otherwise start.
        overwrite: start a new run even if the directory holds one, which moves to its sub-folder
            former.
        progress: show a progress bar on stderr.

    Raises:
        ConfigError: the model, its arguments, weights or data do not fit; the directory holds a
            run and neither `resume` nor `overwrite` is set, or files but no run and `overwrite` is;
            `resume` with another config; another run is at work in the directory.
        DatasetError, FileNotFoundError: the data cannot be used.
        CheckpointError: no checkpoint to resume from is whole.
        DamagedItem: an item of the data cannot be read, and `config.run.skip_bad` is off.
        LoaderError: the processes that read the data hang or died.
        NonFiniteError: NaN or infinity; the last checkpoint is kept.
        Interrupted: Ctrl-C, or as its subclass Preempted SIGTERM; a checkpoint was written at that
            update.
        OSError: a full disk; the last checkpoint is kept.
    """
    run_dir = Path(config.run.output)
    with stop_on_signals() as stop:
        accelerator = make_accelerator(config.optimisation.accumulation_steps)
        if config.machine.keep_freed_memory and accelerator.device.type == "cpu":
            keep_freed_memory()
        with only_run(run_dir, accelerator):
            found = open_run(config, resume=resume, overwrite=overwrite)
            parts = assemble(config, accelerator, found, lambda: stop.vote)
            parts.state.config = config.as_dict()
            # Only now that everything above is known to fit, and that every process has read it.
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                begin_directory(run_dir, config, accelerator.device, anew=overwrite)
            run = _Run(config, accelerator, parts.state, parts, run_dir, stop)
            evaluation = run.train(progress)
            model = unshared(parts.evaluated, parts.task, config.model.name, parts.model_args)
            to_plain(model)
    return TrainResult(
        run_dir=run_dir,
        config=config,
        metrics=run.summary(),
        model=model.eval(),
        evaluation=evaluation,
        task=parts.task,
        is_main=accelerator.is_main_process,
    )


def _put_back(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the former value of each buffer into it."""
    for buffer, former in buffers:
        buffer.copy_(former)


@dataclass
class _Run:
    """The loop with what it works on."""

    config: TrainConfig
    accelerator: Accelerator
    state: TrainState
    parts: Parts
    run_dir: Path
    stop: StopRequest
    epoch_updates: Generator[list[Batch]] | None = None
    """The micro-batches of each update that is left of the epoch at work; None between epochs."""

    def train(self, progress: bool) -> Evaluation:
        """Make the updates that are left; return the evaluation at the run's end."""
        config, state, parts = self.config, self.state, self.parts
        damaged = DamagedItems(config.run.skip_bad, state.damaged_items)
        every = config.run.checkpoint_every
        evaluation = None
        updates = parts.length.updates
        with ExitStack() as left:
            left.enter_context(dead_workers_named())
            left.callback(parts.loaders.end)
            left.callback(self._end_epoch)
            log = None
            if self.accelerator.is_main_process:
                device, task = self.accelerator.device, parts.task
                log = left.enter_context(
                    RunLog(self.run_dir, config, device, state, task, updates, progress)
                )
                if state.history and state.history[-1]["update"] == state.update:
                    # The process may have ended between its checkpoint and these files.
                    log.metrics(state.history, self.summary())
            reduction = inner_loss_reduction(self._inner_losses())
            if log is not None:
                log.reduction = reduction
            training_mode(parts.model)
            while True:
                if self._evaluation_is_due():
                    evaluation = self._end_span(damaged, log)
                    training_mode(parts.model)
                if state.update == updates:
                    break
                self._update(damaged, log)
                if every and state.update % every == 0:
                    self._checkpoint()

            if evaluation is None:  # resumed after its end
                evaluation = self._evaluate(damaged)
        return evaluation

    def summary(self) -> dict[str, Any]:
        """Return the content of metrics.json."""
        parts = self.parts
        return summary(self.config, self.state, parts.task, parts.model, parts.length.updates)

    def _next_batches(self) -> list[Batch]:
        """Return the micro-batches of the next update."""
        if self.epoch_updates is None:
            updates = self.parts.loaders.updates(self.state.epoch, done=self.state.position)
            self.epoch_updates = timed(updates, self.state)
        return next(self.epoch_updates)

    def _end_epoch(self) -> None:
        """End the iteration over an epoch's batches."""
        if self.epoch_updates is not None:
            self.epoch_updates.close()
            self.epoch_updates = None

    def _update(self, damaged: DamagedItems, log: RunLog | None) -> None:
        """Make one update, count and log it.

        Raises:
            Interrupted: the process was asked to stop; the checkpoint is written.
        """
        config, state, parts = self.config, self.state, self.parts
        started = time.perf_counter() - state.span_seconds
        update = self._next_batches()
        for batch in update:
            damaged.check(batch)
        parts.scheduler.step_update(state.update)
        parts.warm_up_inner(state.update)
        first_pass = state.position * config.optimisation.accumulation_steps
        average = None if parts.average is None else parts.average.module
        moment = Moment(state.update / parts.length.updates, average, state.epoch)
        own = [*parts.model.buffers(), *(() if average is None else average.buffers())]
        buffers = [(each, each.clone()) for each in own]
        outcome = parts.step(update, state.epoch, first_pass, moment)
        if outcome.finite:
            state.loss_sum += outcome.loss_sum
            state.loss_units += outcome.units
        else:
            # Forward passes move the statistics of batch norms; the search makes one more.
            _put_back(buffers)
            refuse_or_skip(outcome, parts, config, state, self.accelerator)
            _put_back(buffers)
        state.units += outcome.units
        state.epoch_units += outcome.units
        state.update += 1
        state.position += 1
        if state.position == parts.loaders.updates_per_epoch:
            if not state.epoch_units:
                raise DatasetError(f"not one of the training {parts.task.unit} can be read")
            state.epoch, state.position, state.epoch_units = state.epoch + 1, 0, 0
            self._end_epoch()
        state.span_seconds = time.perf_counter() - started
        if parts.average is not None and outcome.finite:
            decay = parts.task.average_decay(moment)
            if decay is None:
                parts.average.update(parts.model, step=state.update)
            else:
                parts.average.decay = decay
                parts.average.update(parts.model)
        if log is not None:
            log.update(state, outcome, largest_rate(parts.optimizer))
        if outcome.stop_votes:
            self._end(outcome.stop_votes)

    def _evaluation_is_due(self) -> bool:
        """Whether the run is where it is to be evaluated, and has not been."""
        state, every = self.state, self.config.run.evaluate_every
        if state.update == 0 or (state.history and state.history[-1]["update"] == state.update):
            return False
        at_place = state.position == 0 if every is None else state.update % every == 0
        return at_place or state.update == self.parts.length.updates

    def _end_span(self, damaged: DamagedItems, log: RunLog | None) -> Evaluation:
        """Evaluate, add a row to the history, log it and write a checkpoint."""
        state, parts = self.state, self.parts
        evaluation = self._evaluate(damaged)
        add_row(
            state,
            evaluation,
            self._inner_losses(),
            parts.task,
            parts.optimizer,
            parts.loaders.updates_per_epoch,
            self.accelerator.device,
        )
        self._checkpoint()
        if log is not None:
            log.row(state.history[-1])
            log.metrics(state.history, self.summary())
            updates = parts.length.updates
            _LOGGER.info(row_line(state.history[-1], self.config, parts.task, updates))
        return evaluation

    def _inner_losses(self) -> dict[str, Any]:
        watched = self.parts.watched
        return {} if watched is None else inner_losses(self.parts.evaluated, watched)

    def _evaluate(self, damaged: DamagedItems) -> Evaluation:
        def between() -> None:
            (votes,) = summed([self.stop.vote], self.accelerator)
            if votes:
                self._end(votes)

        share_buffers(self.parts.evaluated, self.accelerator)
        return self.parts.task.evaluate(
            self.parts.evaluated,
            self.parts.loaders.test,
            self.accelerator,
            damaged=damaged,
            between=between,
        )

    def _checkpoint(self) -> None:
        """Write the weights, then the state, so that a state on the disk always has its weights."""
        state, parts = self.state, self.parts
        state.damaged_items[:] = all_names(state.damaged_items)
        weights = parts.evaluated.state_dict()
        saved = SavedRun(
            state,
            parts.model.state_dict(),
            {} if parts.average is None else weights,
            optimizer_moments(parts.model, parts.optimizer),
        )
        metadata = ModelMetadata(
            task=asdict(self.config.task),
            model=self.config.model.name,
            model_args=parts.model_args,
            carried=parts.task.carried(),
            data=asdict(self.config.data),
            epoch=state.epoch,
            update=state.update,
            averaged=parts.average is not None,
            metrics=state.test_metrics,
        )
        writes = self.accelerator.is_main_process
        best = is_best(state, parts.task.primary)
        for name in (BEST_FILE, WEIGHTS_FILE) if best else (WEIGHTS_FILE,):
            with failing_together():
                save_weights(self.run_dir / name, weights, metadata, writes=writes)
        save_checkpoint(self.run_dir, saved, self.config.run.keep_checkpoints, self.accelerator)

    def _end(self, votes: float) -> None:
        """Write a checkpoint and end the run there, as the request to stop asks.

        Raises:
            Interrupted: always.
        """
        self._checkpoint()
        epoch = (self.state.update - 1) // self.parts.loaders.updates_per_epoch + 1
        raise self.stop.error(
            votes,
            f"stopped after update {self.state.update} (epoch {epoch});"
            f" {self.run_dir / WEIGHTS_FILE} is complete. Resume with:"
            f" vision-ttt train {shlex.quote(str(self.run_dir / 'config.yaml'))} --resume",
        )
