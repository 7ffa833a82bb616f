"""Measuring every item of a dataset once, on however many processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vision_ttt.data import DatasetError, watched
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.parallel import together

_Measured = TypeVar("_Measured")


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
    rows: dict[str, list[Tensor]] = {"indices": []}
    for indices, measured in _measured(measure, model, loader, accelerator, damaged, between):
        rows["indices"].append(indices)
        for name, values in measured.items():
            rows.setdefault(name, []).append(values.cpu())
    if not rows["indices"]:
        raise DatasetError("the test set is empty")
    every = together({name: torch.cat(parts) for name, parts in rows.items()})
    _, first = np.unique(every.pop("indices").numpy(), return_index=True)
    if not len(first):
        raise DatasetError("the test set has no item that can be read")
    return {name: values[torch.from_numpy(first)].clone() for name, values in every.items()}


def objects_of_items(
    measure: Callable[[dict[str, Any]], Sequence[Any]],
    model: nn.Module,
    loader: DataLoader,
    accelerator: Accelerator,
    *,
    damaged: DamagedItems,
    between: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Measure each item as :func:`rows_of_items` does, where items have no rows of one shape.

    Args:
        measure: a batch of B items, on the device → B objects that can be pickled.

    Returns:
        The objects of all items, each once, in the dataset's order.

    Raises:
        DamagedItem, DatasetError: as :func:`rows_of_items`.
    """
    own: dict[int, Any] = {}
    for indices, objects in _measured(measure, model, loader, accelerator, damaged, between):
        own.update(zip(indices.tolist(), objects, strict=True))
    parts = gather_object([own])
    found = {index: each for part in parts for index, each in part.items()}
    if not found:
        raise DatasetError("the test set has no item that can be read")
    return [found[index] for index in sorted(found)]


def _measured(
    measure: Callable[[dict[str, Any]], _Measured],
    model: nn.Module,
    loader: DataLoader,
    accelerator: Accelerator,
    damaged: DamagedItems,
    between: Callable[[], None],
) -> Iterator[tuple[Tensor, _Measured]]:
    """Indices and measures of each batch of `loader`."""
    was_training = model.training
    model.eval()
    try:
        for batch in watched(loader):
            between()
            damaged.check(batch)
            given = send_to_device(batch, accelerator.device, non_blocking=True)
            # Not around the loop: a generator would leave the mode on in what iterates over it.
            with torch.inference_mode():
                measured = measure(given)
            yield batch["indices"], measured
    finally:
        model.train(was_training)


def at_least_one(items: Tensor) -> Tensor:
    """Return items [B, …], or one item of zeros if there is none.

    A process without items must run the model, too: the others wait for its gradients, and for its
    parts of a sharded model.
    """
    return items if len(items) else items.new_zeros(1, *items.shape[1:])


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which forward passes run in `precision`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")
