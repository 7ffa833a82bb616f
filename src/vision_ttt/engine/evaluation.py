"""Measuring every item of a dataset once, on however many processes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.data import DatasetError, watched
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.parallel import together


def rows_of_items(
    measure: Callable[[dict[str, Any]], Mapping[str, Tensor]],
    model: nn.Module,
    loader: DataLoader,
    accelerator: Accelerator,
    *,
    damaged: DamagedItems,
    between: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Measure each item that `loader` and those of the other processes hold.

    Args:
        measure: a batch of B items, on the device → named rows [B, …]; called for batches without
            an item, too.
        model: set to evaluation mode meanwhile.
        between: called before each batch; what it raises ends the evaluation.

    Returns:
        The rows [N, …] by name, on the CPU, each item once, in the dataset's order.

    Raises:
        DamagedItem: an item cannot be read and is not to be skipped.
        DatasetError: there is no item.
    """
    was_training = model.training
    model.eval()
    rows: dict[str, list[Tensor]] = {"indices": []}
    try:
        with torch.inference_mode():
            for batch in watched(loader):
                between()
                damaged.check(batch)
                rows["indices"].append(batch["indices"])
                given = send_to_device(batch, accelerator.device, non_blocking=True)
                for name, measured in measure(given).items():
                    rows.setdefault(name, []).append(measured.cpu())
    finally:
        model.train(was_training)
    if not rows["indices"]:
        raise DatasetError("the test set is empty")
    every = together({name: torch.cat(parts) for name, parts in rows.items()}, accelerator)
    indices, first = unique_rows(every.pop("indices"))
    if not len(indices):
        raise DatasetError("the test set has no item that can be read")
    return {name: values[first].clone() for name, values in every.items()}


def unique_rows(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different indices [N] in order, and for each where it comes first."""
    ordered, places = torch.sort(indices, stable=True)
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    return ordered[fresh], places[fresh]


def at_least_one(items: Tensor) -> Tensor:
    """Return items [B, …], or one of zeros where there is none.

    Several processes wait for each other's gradients, and for the parts of a sharded model.
    """
    return items if len(items) else items.new_zeros(1, *items.shape[1:])


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which forward passes run in `precision`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")
