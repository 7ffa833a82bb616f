"""Measuring items one by one: objects of any shape, each once, in order."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from vision_ttt.data import DatasetError
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import objects_of_items
from vision_ttt.engine.task import Batch
from vision_ttt.errors import DamagedItem


def _batch(indices: list[int], damaged: tuple[DamagedItem, ...] = ()) -> Batch:
    return {"indices": torch.tensor(indices, dtype=torch.int64), "damaged": list(damaged)}


def _measured(batches: list[Batch], **options: object) -> list[str]:
    model = nn.Linear(2, 2)
    seen: list[bool] = []

    def measure(batch: Batch) -> list[str]:
        seen.append(model.training or not torch.is_inference_mode_enabled())
        return ["x" * index for index in batch["indices"].tolist()]

    found = objects_of_items(
        measure, model, batches, Accelerator(), damaged=DamagedItems(skip=True), **options
    )
    assert model.training
    assert not torch.is_inference_mode_enabled()
    assert not any(seen)
    return found


def test_each_item_once_in_order() -> None:
    assert _measured([_batch([3, 1]), _batch([]), _batch([2, 3])]) == ["x", "xx", "xxx"]
    error = DamagedItem("2 is damaged", "2")
    assert _measured([_batch([1], (error,)), _batch([4])]) == ["x", "xxxx"]


def test_nothing_to_measure_and_what_stops_it() -> None:
    with pytest.raises(DatasetError, match="no item that can be read"):
        _measured([_batch([])])

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _measured([_batch([1])], between=stop)
