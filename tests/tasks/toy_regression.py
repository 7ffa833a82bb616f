"""A task of another package: regression on vectors. `python toy_regression.py ARGUMENTS` is
`vision-ttt ARGUMENTS` with it in the table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vision_ttt import tasks
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import ConfigError, TaskSection, TrainConfig
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.evaluation import at_least_one, rows_of_items
from vision_ttt.engine.section import COUNT, NOT_NEGATIVE, Section, number
from vision_ttt.engine.task import Batch, Metric, Moment, Report, Task
from vision_ttt.errors import DamagedItem

SIZE, TARGETS = 8, 3


@dataclass(frozen=True)
class VectorData(Section):
    """Vectors, and a linear map of them to learn."""

    vectors: int = number(64, COUNT)
    """Training vectors; half as many are for test."""
    unreadable: int = number(0, NOT_NEGATIVE)
    """How many of the first training vectors are damaged."""
    pause: float = number(0.0, NOT_NEGATIVE)
    """Seconds that reading a vector takes."""


@tasks.register
@dataclass(frozen=True)
class RegressionSection(TaskSection):
    """Regression by squared errors."""

    name: Literal["regression"] = "regression"
    """Name of the task."""
    jitter: float = number(0.0, NOT_NEGATIVE)
    """Standard deviation of the noise on training vectors."""

    DATA: ClassVar[type[VectorData]] = VectorData
    HOLDS: ClassVar[str] = "a regression"

    def check(self, config: TrainConfig) -> None:
        if config.data.unreadable > config.data.vectors:
            raise ConfigError(f"unreadable is {config.data.unreadable}; it must be at most vectors")

    def open(self, config: TrainConfig) -> Regression:
        return Regression(config)

    @classmethod
    def rebuild(cls, metadata: ModelMetadata) -> nn.Module:
        return _network(**metadata.model_args)


class VectorError(DamagedItem):
    """A vector that cannot be read."""

    def __init__(self, index: int) -> None:
        super().__init__(f"vector {index} is damaged", str(index))


class Vectors(Dataset):
    """Items are (vector [8], targets [3], index), or a `VectorError`."""

    def __init__(self, count: int, seed: int, unreadable: int = 0, pause: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vectors = torch.randn(count, SIZE, generator=generator)
        weights = torch.randn(SIZE, TARGETS, generator=torch.Generator().manual_seed(99))
        self.targets = self.vectors @ weights
        self.unreadable = unreadable
        self.pause = pause

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int] | VectorError:
        time.sleep(self.pause)
        if index < self.unreadable:
            return VectorError(index)
        return self.vectors[index], self.targets[index], index


@dataclass(frozen=True)
class Errors:
    """How far predictions are from their targets."""

    squared: Tensor

    @property
    def metrics(self) -> Mapping[str, float]:
        mean = self.squared.mean().item()
        return {"loss": mean, "error": mean**0.5}


class Regression(Task):
    """Squared errors of the targets, each of which counts as a unit."""

    unit = "targets"
    primary = Metric("error", higher_is_better=False)
    units_per_item = TARGETS

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def model_arguments(self) -> dict[str, Any]:
        return {"hidden": 16, **self.config.model.arguments}

    def build_model(self, name: str, arguments: Mapping[str, Any]) -> nn.Module:
        return _network(**arguments)

    def prepare(self, model: nn.Module) -> None:
        data = self.config.data
        self.train_set = Vectors(data.vectors, 0, data.unreadable, data.pause)
        self.test_set = Vectors(data.vectors // 2, 1)

    def collate(self, items: Sequence[Any]) -> Batch:
        good = [item for item in items if not isinstance(item, VectorError)]
        return {
            "vectors": torch.stack([i[0] for i in good]) if good else torch.empty(0, SIZE),
            "targets": torch.stack([i[1] for i in good]) if good else torch.empty(0, TARGETS),
            "indices": torch.tensor([i[2] for i in good], dtype=torch.int64),
            "damaged": [item for item in items if isinstance(item, VectorError)],
        }

    def augment(self, batch: Batch) -> Batch:
        vectors = batch["vectors"]
        jitter = self.config.task.jitter * torch.randn_like(vectors)
        return {**batch, "vectors": vectors + jitter}

    def loss(self, forward: nn.Module, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        count = len(batch["vectors"])
        predicted = forward(at_least_one(batch["vectors"]))[:count]
        return ((predicted - batch["targets"]) ** 2).sum(), count * TARGETS

    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        damaged: DamagedItems,
        between: Callable[[], None],
    ) -> Errors:
        def measure(batch: Batch) -> dict[str, Tensor]:
            count = len(batch["vectors"])
            predicted = model(at_least_one(batch["vectors"]))[:count]
            return {"squared": ((predicted - batch["targets"]) ** 2).mean(dim=1)}

        rows = rows_of_items(measure, model, loader, accelerator, damaged=damaged, between=between)
        return Errors(rows["squared"])

    def carried(self) -> dict[str, Any]:
        return {"size": SIZE}

    def described(self) -> dict[str, Any]:
        return {"dataset": "vectors", "train_vectors": len(self.train_set)}

    def report(self, result: Any) -> Report:
        return Report((), {"test error": f"{result.metrics['test_error']:.3f}"}, {})


def _network(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, hidden), nn.GELU(), nn.Linear(hidden, TARGETS))


if __name__ == "__main__":
    from vision_ttt.cli.main import main

    sys.exit(main(sys.argv[1:]))
