"""A run's figures: one row per evaluation, and the summary that metrics.json holds."""

import time
from collections.abc import Generator, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vision_ttt.engine.config import TrainConfig
from vision_ttt.engine.logs import memory_in_use, place_in_run, versions
from vision_ttt.engine.state import TrainState
from vision_ttt.engine.task import Evaluation, Metric, Task

_Item = TypeVar("_Item")


def timed(items: Iterable[_Item], state: TrainState) -> Generator[_Item]:
    """Go through `items`, adding the time spent waiting for them to `state.data_seconds`."""
    iterator = iter(items)
    while True:
        started = time.perf_counter()
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            state.data_seconds += time.perf_counter() - started
        yield item


def inner_loss_reduction(losses: dict[str, Tensor]) -> float | None:
    """Return by how much the inner loss is less at the scan's end than at its start.

    It is 1 - (loss on the last mini-batch) / (loss on the first), each the mean over layers.
    Negative where the inner learners get worse. None for a model without TTT layers, and for a
    sequence of one mini-batch.
    """
    if all(len(steps) < 2 for steps in losses.values()):
        return None
    first = sum(steps[0].item() for steps in losses.values())
    last = sum(steps[-1].item() for steps in losses.values())
    return 1 - last / first if first else 0.0


def is_best(state: TrainState, primary: Metric) -> bool:
    """Whether `state` is at an evaluation, and it the best one so far."""
    if not state.history or state.history[-1]["update"] != state.update:
        return False
    *former, last = (row[f"test_{primary.name}"] for row in state.history)
    return all(primary.better(last, other) for other in former)


def add_row(
    state: TrainState,
    evaluation: Evaluation,
    losses: dict[str, Tensor],
    task: Task,
    optimizer: torch.optim.Optimizer,
    updates_per_epoch: int,
    device: torch.device,
) -> None:
    """Add an evaluation's row to the history, and begin to count anew what lies between two."""
    by_layer = {layer: steps.tolist() for layer, steps in losses.items()}
    every = [loss for steps in by_layer.values() for loss in steps]
    state.seconds += state.span_seconds
    row = {
        "epoch": state.epoch
        if state.position == 0
        else round(state.epoch + state.position / updates_per_epoch, 4),
        "update": state.update,
        "learning_rate": largest_rate(optimizer),
        "train_loss": state.loss_sum / state.loss_units if state.loss_units else None,
        **{f"test_{name}": value for name, value in evaluation.metrics.items()},
        "inner_loss": sum(every) / len(every) if every else None,
        "inner_loss_reduction": inner_loss_reduction(losses),
        "inner_losses": by_layer,
        rate_name(task): state.units / state.span_seconds,
        "data_share": state.data_seconds / state.span_seconds,
        "memory_bytes": memory_in_use(device),
        "seconds": state.span_seconds,
    }
    state.history.append(row)
    state.loss_sum, state.loss_units, state.units = 0.0, 0, 0
    state.span_seconds = state.data_seconds = 0.0


def summary(
    config: TrainConfig, state: TrainState, task: Task, model: nn.Module, updates: int
) -> dict[str, Any]:
    """Return the content of metrics.json of a run of `updates`; there must be one evaluation."""
    unit, length = config.optimisation.length
    primary = f"test_{task.primary.name}"
    best = state.history[0][primary]
    for row in state.history:
        best = row[primary] if task.primary.better(row[primary], best) else best
    return {
        "task": config.task.name,
        "model": config.model.name,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        **task.described(),
        **state.test_metrics,
        f"best_{primary}": best,
        "seconds": state.seconds,
        "seed": config.run.seed,
        "length": {unit: length},
        "finished": state.update >= updates,
        "damaged_items": list(state.damaged_items),
        "skipped_updates": list(state.skipped_updates),
        "versions": versions(),
        "history": list(state.history),
    }


def rate_name(task: Task) -> str:
    """Return the name of a row's training speed, e.g. tokens_per_second."""
    return f"{task.unit}_per_second"


def largest_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the largest learning rate of the parameter groups; with layer decay it is the head's.

    A factor above 1 on a group's rate does not count.
    """
    return float(
        max(group["lr"] / max(group.get("lr_scale", 1.0), 1.0) for group in optimizer.param_groups)
    )


def row_line(row: Mapping[str, Any], config: TrainConfig, task: Task, updates: int) -> str:
    """Return a row's figures in one line."""
    train = "" if row["train_loss"] is None else f"train loss {row['train_loss']:.4f}, "
    figures = f"test loss {row['test_loss']:.4f}, " if "test_loss" in row else ""
    primary = task.primary
    if primary.name != "loss":
        value = row[f"test_{primary.name}"]
        figures += f"test {primary.name} {primary.written(value)}, "
    return (
        f"{place_in_run(row['epoch'], row['update'], config, updates)}: {train}{figures}"
        f"{row[rate_name(task)]:.0f} {task.unit}/s"
    )
