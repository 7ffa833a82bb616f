"""A run's state: everything needed to go on exactly as if it had never been interrupted."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_ttt.engine.parallel import place_like, whole
from vision_ttt.engine.tensor_files import CheckpointError, read_tensors, write_tensors

_FORMAT = 3


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
    skipped_updates: list[int] = field(default_factory=list)
    """Updates left out because their loss or gradient was not finite, counted from 0."""


@dataclass(frozen=True)
class SavedRun:
    """What a state file holds."""

    state: TrainState
    model: dict[str, Tensor]
    """The weights in training."""
    average: dict[str, Tensor]
    """Their moving average; empty where there is none."""
    moments: dict[str, Tensor]
    """The optimiser's, as `optimizer_moments` names them."""


def save_state(path: Path, saved: SavedRun) -> None:
    """Write everything that resuming needs, atomically and with its SHA-256.

    Raises:
        OSError: the disk is full or the folder cannot be written; the former file is kept.
    """
    parts = {"model": saved.model, "average": saved.average, "moments": saved.moments}
    tensors = {f"{part}/{name}": t for part, own in parts.items() for name, t in own.items()}
    write_tensors(path, tensors, json.dumps({"format": _FORMAT, "state": asdict(saved.state)}))


def read_state(path: str | Path) -> SavedRun:
    """Return what `save_state` wrote.

    Raises:
        FileNotFoundError: there is no such file, so nothing to resume.
        CheckpointError: truncated, damaged, or not a run's state.
    """
    tensors, text = read_tensors(path)
    try:
        values = json.loads(text or "null")
        if values["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {values['format']}; {_FORMAT} is read")
        state = TrainState(**values["state"])
        counts = (state.epoch, state.position, state.update)
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError(f"epoch, position and update are {counts}")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not the state of a run: {error}") from error
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "moments": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        if part not in parts:
            raise CheckpointError(f"{path} is not the state of a run: it holds {key}")
        parts[part][name] = tensor
    return SavedRun(state, **parts)


def check_fits(saved: SavedRun, model: nn.Module, *, averaged: bool) -> None:
    """Check that a state is that of such a model's training, whole.

    Args:
        averaged: whether the run keeps a moving average.

    Raises:
        ValueError: tensors are missing, left over or of another shape; names the first of them.
    """
    own = {name: value.shape for name, value in model.state_dict().items()}
    _check_shapes("model", saved.model, own)
    _check_shapes("average", saved.average, own if averaged else {})
    weights = {name: weight.shape for name, weight in model.named_parameters()}
    quantities: dict[str, set[str]] = {}
    for key, value in saved.moments.items():
        name, _, quantity = key.rpartition("/")
        if name not in weights or value.shape not in (weights[name], torch.Size()):
            raise ValueError(f"moments/{key} {list(value.shape)} is of no weight of the model")
        quantities.setdefault(name, set()).add(quantity)
    known = set().union(*quantities.values())
    for name, told in quantities.items():
        if told != known:
            raise ValueError(f"moments/{name} has no {', '.join(sorted(known - told))}")


def _check_shapes(part: str, tensors: Mapping[str, Tensor], own: Mapping[str, torch.Size]) -> None:
    for name in sorted({*tensors, *own}):
        if name not in tensors:
            raise ValueError(f"{part}/{name} is missing")
        if name not in own:
            raise ValueError(f"{part}/{name} is of no weight of the model")
        if tensors[name].shape != own[name]:
            shapes = f"{list(tensors[name].shape)} for {list(own[name])}"
            raise ValueError(f"{part}/{name} is of another shape, {shapes}")


def optimizer_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimiser's running quantities as `PARAMETER/QUANTITY`, whole on every process.

    Rates, decays and groups are not among them: they follow from the config.
    """
    return {
        f"{name}/{key}": whole(value)
        for name, weight in model.named_parameters()
        for key, value in optimizer.state.get(weight, {}).items()
    }


def restore_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]
) -> None:
    """Give an optimiser what `optimizer_moments` returned."""
    weights = dict(model.named_parameters())
    places = {
        id(weight): index
        for index, weight in enumerate(w for g in optimizer.param_groups for w in g["params"])
    }
    content = optimizer.state_dict()
    for key, value in moments.items():
        name, _, quantity = key.rpartition("/")
        own = content["state"].setdefault(places[id(weights[name])], {})
        own[quantity] = place_like(value, weights[name])
    optimizer.load_state_dict(content)
