"""A run's figures: one row per epoch, and the summary that metrics.json holds."""

from typing import Any

import torch
from torch import Tensor, nn

from vision_ttt.data import ImageSplits
from vision_ttt.engine.checkpoint import TrainState
from vision_ttt.engine.config import TrainConfig
from vision_ttt.engine.evaluate import Evaluation
from vision_ttt.engine.logs import versions


def end_epoch(
    state: TrainState,
    evaluation: Evaluation,
    losses: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Add the epoch's row to the history and set the counters to the next epoch's start."""
    by_layer = {layer: steps.tolist() for layer, steps in losses.items()}
    every = [loss for steps in by_layer.values() for loss in steps]
    state.seconds += state.epoch_seconds
    row = {
        "epoch": state.epoch + 1,
        "update": state.update,
        "learning_rate": largest_rate(optimizer),
        "train_loss": state.loss_sum / state.images,
        "test_loss": evaluation.loss,
        "test_accuracy": evaluation.accuracy,
        "inner_loss": sum(every) / len(every) if every else None,
        "inner_losses": by_layer,
        "images_per_second": state.images / state.epoch_seconds,
        "seconds": state.epoch_seconds,
    }
    state.history.append(row)
    state.epoch += 1
    state.position, state.loss_sum, state.images, state.epoch_seconds = 0, 0.0, 0, 0.0


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
        "seconds": state.seconds,
        "seed": config.seed,
        "bad_images": list(state.bad_images),
        "versions": versions(),
        "epochs": list(state.history),
    }


def largest_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the largest of the groups' learning rates: that of the head, with layer decay."""
    return float(max(group["lr"] for group in optimizer.param_groups))


def epoch_line(state: TrainState, config: TrainConfig) -> str:
    """Return the last epoch's figures in one line."""
    row = state.history[-1]
    return (
        f"epoch {state.epoch}/{config.epochs}: train loss {row['train_loss']:.4f}, test loss"
        f" {row['test_loss']:.4f}, test accuracy {row['test_accuracy']:.2%},"
        f" {row['images_per_second']:.0f} images/s"
    )
