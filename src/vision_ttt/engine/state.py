"""A run's state: everything needed to go on exactly as if it had never been interrupted."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_ttt.engine.described import read_json
from vision_ttt.engine.tensor_files import (
    CheckpointError,
    Shapes,
    inspect_tensors,
    load_tensors,
    write_tensors,
)
from vision_ttt.models.number_kinds import kind_of_number

_FORMAT = 3
_PARTS = ("model", "average", "moments")


@dataclass
class TrainState:
    """How far a run has come.

    No generator's state is here: all randomness follows from the seed and the counters. Neither is
    the schedule's: it is a function of `update`.
    """

    config: dict[str, Any] = field(default_factory=dict)
    """The run's config, by section."""
    epoch: int = 0
    """Whole epochs done."""
    position: int = 0
    """Updates done in the current epoch."""
    update: int = 0
    """Updates done altogether."""
    epoch_units: int = 0
    """Units seen in the current epoch."""
    loss_sum: float = 0.0
    """Training loss summed since the last evaluation, but for skipped updates."""
    loss_units: int = 0
    """The units that it is summed over."""
    units: int = 0
    """Units seen since the last evaluation."""
    span_seconds: float = 0.0
    """Time spent training since the last evaluation, in seconds."""
    data_seconds: float = 0.0
    """The part of it spent waiting for data, in seconds."""
    seconds: float = 0.0
    """Time spent training up to the last evaluation, in seconds."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One row of metrics per evaluation."""
    damaged_items: list[str] = field(default_factory=list)
    """Names of the items that could not be read."""
    train_items: int = 0
    """Number of training items; 0 in checkpoints of earlier versions."""
    held_out: str = ""
    """Digest of the items held out for test, if the task draws them; "" otherwise, and in
    checkpoints of earlier versions."""
    skipped_updates: list[int] = field(default_factory=list)
    """Updates left out because their loss or gradient was not finite, counted from 0."""

    @property
    def test_metrics(self) -> dict[str, float]:
        """Metrics of the test set at the last evaluation; empty before the first one."""
        return {
            name: value
            for row in self.history[-1:]
            for name, value in row.items()
            if name.startswith("test_")
        }


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint holds; each process's part of the tensors where the run is sharded."""

    state: TrainState
    model: dict[str, Tensor]
    """The weights in training."""
    average: dict[str, Tensor]
    """Their moving average; empty where there is none."""
    moments: dict[str, Tensor]
    """The optimiser's, as `optimizer_moments` names them."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors as `PART/NAME`, e.g. `model/head.weight`."""
        return {f"{part}/{name}": t for part in _PARTS for name, t in getattr(self, part).items()}


@dataclass(frozen=True)
class StoredRun:
    """A checkpoint that was checked; its tensors are still in its file."""

    path: Path
    state: TrainState
    tensors: Shapes

    def shapes(self, part: str) -> Shapes:
        """Return the tensors of "model", "average" or "moments": their dtypes and shapes."""
        return {
            key.removeprefix(f"{part}/"): value
            for key, value in self.tensors.items()
            if key.startswith(f"{part}/")
        }


def save_state(path: Path, saved: SavedRun, *, writes: bool = True) -> None:
    """Write everything that resuming needs, atomically and with its SHA-256.

    Args:
        writes: as of `write_tensors`: every process that shares the tensors has to call this.

    Raises:
        OSError: the disk is full or the folder cannot be written; a former file is kept.
    """
    text = json.dumps({"format": _FORMAT, "state": asdict(saved.state)})
    write_tensors(path, saved.tensors, text, writes=writes)


def open_state(path: str | Path, *, hashing: bool = True) -> StoredRun:
    """Check a checkpoint and return what is in it, without reading the tensors.

    Args:
        hashing: whether to read the file through, and check its SHA-256.

    Raises:
        FileNotFoundError: there is no such checkpoint, so nothing to resume.
        CheckpointError: truncated, damaged, or not a run's state.
    """
    path = Path(path)
    stored = inspect_tensors(path, hashing=hashing)
    if stored.digest is None:
        raise CheckpointError(f"{path} has no SHA-256; it is not the state of a run")
    try:
        values = read_json(stored.text or "null")
        if values["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {values['format']}; {_FORMAT} is read")
        state = TrainState(**values["state"])
        counts = (state.epoch, state.position, state.update)
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError(f"epoch, position and update are {counts}")
        if not isinstance(state.config, dict) or not isinstance(state.history, list):
            raise TypeError("config is no mapping, or history no list")
        if not all(isinstance(row, dict) for row in state.history):
            raise TypeError("history holds something else than mappings")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not the state of a run: {error}") from error
    for key in stored.shapes:
        if key.partition("/")[0] not in _PARTS:
            raise CheckpointError(f"{path} is not the state of a run: it holds {key}")
    return StoredRun(path, state, stored.shapes)


def read_state(path: str | Path) -> SavedRun:
    """Return a checkpoint with its tensors, whole, in this process's memory.

    Raises:
        FileNotFoundError, CheckpointError: as `open_state`.
    """
    run = open_state(path)
    parts = {
        part: {name: torch.empty(shape, dtype=d) for name, (d, shape) in run.shapes(part).items()}
        for part in _PARTS
    }
    saved = SavedRun(run.state, **parts)
    load_tensors(run.path, saved.tensors)
    return saved


def restore(
    run: StoredRun, model: nn.Module, average: nn.Module | None, optimizer: torch.optim.Optimizer
) -> None:
    """Load a checkpoint that fits (see `check_fits`) into what continues the run.

    Every process calls this, after the models were shared; it reads its own part of the tensors.

    Raises:
        CheckpointError: the file cannot be read any more.
    """
    weights = dict(model.named_parameters())
    moments = {
        key: _empty_moment(weights[key.rpartition("/")[0]], *dtype_and_shape)
        for key, dtype_and_shape in run.shapes("moments").items()
    }
    averages = {} if average is None else average.state_dict()
    saved = SavedRun(run.state, model.state_dict(), averages, moments)
    load_tensors(run.path, saved.tensors)
    # The values are in place already, except where a module's state dict holds copies.
    model.load_state_dict(saved.model)
    if average is not None:
        average.load_state_dict(saved.average)
    restore_moments(model, optimizer, moments)


def _empty_moment(weight: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return memory for a moment, shared among the processes as `weight` is if of its shape."""
    if shape == weight.shape:
        return torch.empty_like(weight.detach(), dtype=dtype)
    return torch.empty(shape, dtype=dtype)


def check_fits(run: StoredRun, model: nn.Module, *, averaged: bool) -> None:
    """Check that a checkpoint holds everything of such a model's training, and nothing else.

    Args:
        averaged: whether the run keeps a moving average.

    Raises:
        ValueError: tensors are missing, left over, of another shape or of another kind of numbers;
            names the first of them.
    """
    own = {name: (value.dtype, value.shape) for name, value in model.state_dict().items()}
    _check_shapes("model", run.shapes("model"), own)
    _check_shapes("average", run.shapes("average"), own if averaged else {})
    weights = {name: weight.shape for name, weight in model.named_parameters()}
    quantities: dict[str, set[str]] = {}
    for key, (dtype, shape) in run.shapes("moments").items():
        name, _, quantity = key.rpartition("/")
        if name not in weights or shape not in (weights[name], torch.Size()):
            raise ValueError(f"moments/{key} {list(shape)} is of no weight of the model")
        if not dtype.is_floating_point:
            raise ValueError(f"moments/{key} has dtype {dtype}; expected a floating-point dtype")
        quantities.setdefault(name, set()).add(quantity)
    known = set().union(*quantities.values())
    for name, stored in quantities.items():
        if stored != known:
            raise ValueError(f"moments/{name} has no {', '.join(sorted(known - stored))}")


def _check_shapes(part: str, stored: Shapes, own: Shapes) -> None:
    for name in sorted({*stored, *own}):
        if name not in stored:
            raise ValueError(f"{part}/{name} is missing")
        if name not in own:
            raise ValueError(f"{part}/{name} is of no weight of the model")
        dtype, shape = stored[name]
        own_dtype, own_shape = own[name]
        if shape != own_shape:
            shapes = f"{list(shape)} for {list(own_shape)}"
            raise ValueError(f"{part}/{name} is of another shape, {shapes}")
        if kind_of_number(dtype) != kind_of_number(own_dtype):
            raise ValueError(
                f"{part}/{name} has dtype {dtype}; expected the kind of numbers of {own_dtype}"
            )


def optimizer_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimiser's running quantities as `PARAMETER/QUANTITY`, sharded as they are.

    Rates, decays and groups are not among them: they follow from the config.
    """
    return {
        f"{name}/{key}": value
        for name, weight in model.named_parameters()
        for key, value in optimizer.state.get(weight, {}).items()
    }


def restore_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]
) -> None:
    """Give an optimiser what `optimizer_moments` returned, sharded as its weights are."""
    weights = dict(model.named_parameters())
    places = {
        id(weight): index
        for index, weight in enumerate(w for g in optimizer.param_groups for w in g["params"])
    }
    content = optimizer.state_dict()
    for key, value in moments.items():
        name, _, quantity = key.rpartition("/")
        content["state"].setdefault(places[id(weights[name])], {})[quantity] = value
    optimizer.load_state_dict(content)
