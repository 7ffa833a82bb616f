"""What the engine asks of a task. A task's package implements it; the engine imports none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from accelerate import Accelerator
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vision_ttt.engine.building import build_model
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.initial_weights import start_from
from vision_ttt.errors import DamagedItem

if TYPE_CHECKING:
    from vision_ttt.engine.train import TrainResult

Batch = dict[str, Any]
"""What `Task.collate` returns. The engine knows two keys: `indices` [B] int64, the items' places in
their dataset, and `damaged`, a list of :class:`vision_ttt.errors.DamagedItem`. The others are the
task's; their tensors, however nested, are moved to the device."""


class Metric(NamedTuple):
    """The figure by which one evaluation is better than another."""

    name: str
    """Its key in `Evaluation.metrics`."""
    higher_is_better: bool
    form: str = ".4f"
    """Its format specification."""

    def written(self, value: float) -> str:
        """Return a value as it is shown."""
        return format(value, self.form)

    def better(self, value: float, than: float) -> bool:
        """Whether `value` beats another; NaN beats nothing and is beaten by any number."""
        if than != than:
            return value == value
        return value > than if self.higher_is_better else value < than


class Evaluation(Protocol):
    """What test data say of a model."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Figures by name, the task's primary one among them."""


@dataclass(frozen=True)
class Moment:
    """Where in a run a loss is computed."""

    done: float
    """Share of the run's updates that are done, from 0 to below 1."""
    average: nn.Module | None
    """The moving average of the weights, in evaluation mode; None where the run has none."""
    epoch: int = 0
    """The epoch at work, from 0."""


@dataclass(frozen=True)
class Report:
    """What a finished run shows, in addition to what every run shows."""

    sections: Sequence[Any]
    """Sections of the page, `vision_ttt.explain.report.Section`s."""
    measured: Mapping[str, str]
    """Name → figure, at the head of the page and of the table on the terminal."""
    files: Mapping[str, Path]
    """Name → other files that were written."""
    next_command: Sequence[str] = ()
    """Arguments of `vision-ttt` for the command to run next; empty if there is none."""
    tables: Sequence[Any] = ()
    """Of the page, `vision_ttt.explain.report.PageTable`s."""
    texts: Sequence[Any] = ()
    """Of the page, `vision_ttt.explain.report.Text`s."""


class Predictor(Protocol):
    """Predicts for files, with the model of a checkpoint."""

    unit: str
    """What the files are, in the plural."""
    columns: Sequence[str]
    """Of the rows that `rows` returns."""
    drawings: Sequence[str]
    """What `draw` can draw of a prediction, e.g. "pictures"."""

    def find(self, given: Sequence[str]) -> list[Path]:
        """Return the files that are given, and those in the folders that are given."""

    def predict(
        self, files: Sequence[Path]
    ) -> Iterator[tuple[list[dict[str, Any]], list[DamagedItem]]]:
        """Yield per batch the predictions, JSON-able, and the errors of the unreadable files."""

    def file_of(self, prediction: dict[str, Any]) -> str:
        """Return the file that a prediction is for."""

    def answer(self, predictions: Sequence[dict[str, Any]], skipped: Sequence[str]) -> Any:
        """Return what a .json file of predictions holds; `skipped` names the unreadable files."""

    def rows(self, prediction: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a prediction as rows of a table, by column; there may be none."""

    def table(self, prediction: dict[str, Any]) -> Any:
        """Return a prediction as rich shows it on a terminal."""

    def draw(self, drawing: str, prediction: dict[str, Any]) -> bytes:
        """Return one of `drawings` of a prediction, as the content of a .png file."""


class Task(ABC):
    """A task of one run: its data, opened, and what is done with them.

    The engine calls, in this order: `model_arguments` and `build_model`, `prepare`, then the rest.
    """

    unit: str
    """What the loss counts, in the plural, e.g. "tokens"."""
    primary: Metric
    """What the best checkpoint is chosen by, and the log shows."""
    train_set: Dataset
    """The training items, from `prepare` on; with an attribute `epoch` that the engine sets where
    items are augmented at random."""
    test_set: Dataset
    """The test items, likewise."""
    repeats: int = 1
    """Times that an item comes in a row in the training order."""
    units_per_item: int = 1
    """Units that an item has at most; the length of a run in units is divided by it."""

    @abstractmethod
    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments of `build_model`, JSON-able; checkpoints carry them."""

    def build_model(self, name: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Build the model with its head, randomly initialised; by default one of timm's registry.

        Raises:
            ConfigError: there is no such model, or it does not accept the arguments.
        """
        return build_model(name, arguments)

    def checkpoint_gradients(self, model: nn.Module) -> None:
        """Let a model recompute activations in the backward pass; by default as timm's models do.

        Raises:
            AttributeError, AssertionError: the model cannot.
        """
        model.set_grad_checkpointing(True)

    def start_from(
        self, path: Path, model: nn.Module, name: str, model_args: Mapping[str, Any]
    ) -> str:
        """Copy the weights of a file into a model, and return what was done, in one line.

        By default every tensor must fit but the head's; positions are interpolated. Arguments and
        errors are those of :func:`vision_ttt.engine.initial_weights.start_from`.
        """
        return start_from(path, model, name, model_args)

    @abstractmethod
    def prepare(self, model: nn.Module) -> None:
        """Set `train_set` and `test_set` for `model`, and check that it accepts their items.

        Raises:
            ConfigError: it does not, or it is no model for this task.
        """

    @property
    @abstractmethod
    def collate(self) -> Callable[[Sequence[Any]], Batch]:
        """Returns a batch of items. Worker processes get a copy of this function, and of the task's
        data and models only if it refers to the task."""

    def augment(self, batch: Batch) -> Batch:
        """Return a training batch, on the device, as the model is to see it.

        What is random in it is drawn from the global generators, which the engine seeds.
        """
        return batch

    @abstractmethod
    def loss(self, forward: nn.Module, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        """Return the summed loss [] of an augmented batch and the number of units in the sum.

        A batch without an item has loss 0, but of the model's graph: other processes wait for it.
        """

    def held_parameters(self, moment: Moment) -> Iterable[nn.Parameter]:
        """Return the parameters that an update leaves as they are; by default none."""
        return ()

    def average_decay(self, moment: Moment) -> float | None:
        """Return the decay of the weights' moving average at an update.

        None, the default: that of the config, warmed up from 0.
        """
        return None

    @abstractmethod
    def evaluate(
        self,
        model: nn.Module,
        loader: DataLoader,
        accelerator: Accelerator,
        *,
        damaged: DamagedItems,
        between: Callable[[], None],
    ) -> Evaluation:
        """Evaluate a model on what `loader` and those of the other processes hold.

        `between` is called before each batch; what it raises ends the evaluation.
        """

    def watched(self) -> Tensor | None:
        """Return inputs of the model on which the inner loss is watched; None: it is not."""
        return None

    def example(self) -> Tensor:
        """Return an input of the model, [1, …], by which its cost is counted.

        Raises:
            NotImplementedError: the task has none.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no example of its model's input")

    @abstractmethod
    def carried(self) -> dict[str, Any]:
        """Return what the task's checkpoints carry beside the model: JSON-able.

        `held_out` is a digest of the items that are held out for test, if the task draws them.
        """

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return what metrics.json says of the data: `dataset`, a name, and counts by name."""

    def figures(self, evaluation: Evaluation) -> dict[str, Any]:
        """Return an evaluation's figures for `vision-ttt eval --json`, the metrics among them."""
        return dict(evaluation.metrics)

    def table(self, title: str, figures: Mapping[str, Any]) -> Any:
        """Return what `figures` returned as rich shows it on a terminal."""
        table = Table(title=title, show_header=False)
        for name, value in figures.items():
            table.add_row(name, f"{value:.6g}")
        return table

    def report(self, result: TrainResult) -> Report:
        """Write the task's pictures into the run's directory and return what its page shows."""
        return Report((), {}, {})
