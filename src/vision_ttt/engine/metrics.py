"""A run's figures: one row per epoch, and the summary that metrics.json holds."""

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vision_ttt.data import ImageSplits
from vision_ttt.engine.config import TrainConfig
from vision_ttt.engine.logs import memory_in_use, versions
from vision_ttt.engine.state import TrainState
from vision_ttt.engine.tasks import TestResult

_Item = TypeVar("_Item")


def timed(items: Iterable[_Item], state: TrainState) -> Iterator[_Item]:
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

    It is 1 - (loss on the last mini-batch) / (loss on the first), each the mean over layers; None
    for a model without TTT layers. Negative where the inner learners get worse.
    """
    if not losses:
        return None
    first = sum(steps[0].item() for steps in losses.values())
    last = sum(steps[-1].item() for steps in losses.values())
    return 1 - last / first if first else 0.0


def is_best(state: TrainState) -> bool:
    """Whether `state` is at the end of the epoch with the highest test accuracy so far.

    Where nothing is classified, with the lowest test loss.
    """
    if state.position or not state.history:
        return False
    *former, last = (
        -row["test_loss"] if row["test_accuracy"] is None else row["test_accuracy"]
        for row in state.history
    )
    return all(last > other for other in former)


def end_epoch(
    state: TrainState,
    evaluation: TestResult,
    losses: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Add the epoch's row to the history and set the counters to the next epoch's start."""
    by_layer = {layer: steps.tolist() for layer, steps in losses.items()}
    every = [loss for steps in by_layer.values() for loss in steps]
    state.seconds += state.epoch_seconds
    row = {
        "epoch": state.epoch + 1,
        "update": state.update,
        "learning_rate": largest_rate(optimizer),
        "train_loss": state.loss_sum / state.loss_images,
        "test_loss": evaluation.loss,
        "test_accuracy": evaluation.accuracy,
        "inner_loss": sum(every) / len(every) if every else None,
        "inner_loss_reduction": inner_loss_reduction(losses),
        "inner_losses": by_layer,
        "images_per_second": state.images / state.epoch_seconds,
        "data_share": state.data_seconds / state.epoch_seconds,
        "memory_bytes": memory_in_use(device),
        "seconds": state.epoch_seconds,
    }
    state.history.append(row)
    state.epoch += 1
    state.position, state.loss_sum, state.loss_images, state.images = 0, 0.0, 0, 0
    state.epoch_seconds = state.data_seconds = 0.0


def summary(
    config: TrainConfig, state: TrainState, data: ImageSplits, model: nn.Module
) -> dict[str, Any]:
    """Return the content of metrics.json; there must be one whole epoch."""
    last = state.history[-1]
    return {
        "model": config.model,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dataset": config.dataset,
        "train_images": len(data.train),
        "test_images": len(data.test),
        "test_accuracy": last["test_accuracy"],
        "test_loss": last["test_loss"],
        "best_test_accuracy": None
        if last["test_accuracy"] is None
        else max(row["test_accuracy"] for row in state.history),
        "seconds": state.seconds,
        "seed": config.seed,
        "bad_images": list(state.bad_images),
        "skipped_updates": list(state.skipped_updates),
        "versions": versions(),
        "epochs": list(state.history),
    }


def largest_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the largest of the groups' learning rates: that of the head, with layer decay."""
    return float(max(group["lr"] for group in optimizer.param_groups))


def epoch_line(state: TrainState, config: TrainConfig) -> str:
    """Return the last epoch's figures in one line."""
    row = state.history[-1]
    accuracy = row["test_accuracy"]
    told = "" if accuracy is None else f" test accuracy {accuracy:.2%},"
    return (
        f"epoch {state.epoch}/{config.epochs}: train loss {row['train_loss']:.4f}, test loss"
        f" {row['test_loss']:.4f},{told} {row['images_per_second']:.0f} images/s"
    )
