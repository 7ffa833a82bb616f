"""What is done about an update whose loss or gradient is NaN or infinite."""

import contextlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from vision_ttt.engine.assembly import Parts
from vision_ttt.engine.checkpoint import WEIGHTS_FILE
from vision_ttt.engine.config import TrainConfig
from vision_ttt.engine.non_finite_search import find_non_finite
from vision_ttt.engine.state import TrainState
from vision_ttt.engine.step import Outcome, Pass, seed_pass
from vision_ttt.engine.tensor_files import CheckpointError, read_tensors, write_tensors
from vision_ttt.errors import UserError

_LOGGER = logging.getLogger(__name__)
REPLAYS = "non-finite"
"""Sub-folder of a run directory for the batches that gave NaN or infinity."""
MOST_IN_A_ROW = 10
"""Updates that may be skipped one after the other."""


class NonFiniteError(UserError, ArithmeticError):
    """Training met NaN or infinity. `update` counts from 0; `where` names the place."""

    def __init__(self, update: int, epoch: int, where: str, kept: str) -> None:
        super().__init__(
            f"training stopped at update {update} (epoch {epoch}): {where} is not finite; {kept}"
        )
        self.update = update
        self.epoch = epoch
        self.where = where


def refuse_or_skip(
    outcome: Outcome,
    parts: Parts,
    config: TrainConfig,
    state: TrainState,
    accelerator: Accelerator,
) -> None:
    """Save what repeats the update, then stop or count it as skipped, as the config says.

    Raises:
        NonFiniteError: the run is to stop, or has skipped `MOST_IN_A_ROW` updates in a row, or as
            many as an epoch has.
    """
    suspects = [each for each in outcome.passes if not math.isfinite(each.loss.item())]
    suspect = (suspects or outcome.passes)[0]
    where = "the loss or a gradient"
    # The search for the place needs whole weights, and would differ between processes.
    if config.machine.sharding == "replicated":
        tensors = tensors_of(suspect.batch)
        where = find_non_finite(parts.model, lambda: _again(parts, suspect), tensors)
    path = _save(suspects or outcome.passes, parts, state, where, accelerator)
    state.skipped_updates.append(state.update)
    hopeless = _all_of_the_last(state, min(MOST_IN_A_ROW, parts.loaders.updates_per_epoch))
    if config.optimisation.non_finite == "stop" or hopeless:
        last = Path(config.run.output) / WEIGHTS_FILE
        kept = f"the last checkpoint is {last}" if last.exists() else "there is no checkpoint yet"
        raise NonFiniteError(state.update, state.epoch, where, f"{kept}; the batch is {path}")
    _LOGGER.warning("skipped update %d: %s is not finite; %s", state.update, where, path)


def replay(path: str | Path) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], dict]:
    """Return what a saved batch holds: the weights it met, its passes, and where it went wrong.

    Each pass has the tensors of its batch by name, as the model saw them, augmented, `indices` [B]
    among them, the items' places in the training set. The last value holds update, epoch, `where`,
    the config and each pass's `places`, its seed.

    Raises:
        FileNotFoundError, CheckpointError: there is no such file, it is damaged, or holds no batch.
    """
    tensors, text = read_tensors(path)
    metadata = json.loads(text or "{}")
    if "places" not in metadata:
        raise CheckpointError(f"{path} does not hold a batch that a run saved")
    weights = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    passes: list[dict[str, Tensor]] = [{} for _ in metadata["places"]]
    for key, tensor in tensors.items():
        number, _, name = key.partition("/")
        if number != "model":
            passes[int(number)][name] = tensor
    return weights, passes, metadata


def _all_of_the_last(state: TrainState, count: int) -> bool:
    """Whether all of the last `count` updates were skipped."""
    return state.skipped_updates[-count:] == list(range(state.update - count + 1, state.update + 1))


def _again(parts: Parts, suspect: Pass) -> None:
    seed_pass(suspect.place)
    with torch.no_grad():
        parts.task.loss(parts.model, suspect.batch, suspect.moment)


def tensors_of(value: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors in a batch, however nested, by names such as "targets/0/boxes"."""
    if isinstance(value, Tensor):
        return {name: value}
    inside = value if isinstance(value, Mapping) else None
    if isinstance(value, list | tuple):
        inside = {str(place): each for place, each in enumerate(value)}
    found: dict[str, Tensor] = {}
    for key, each in (inside or {}).items():
        found |= tensors_of(each, f"{name}/{key}" if name else str(key))
    return found


def _save(
    passes: Sequence[Pass],
    parts: Parts,
    state: TrainState,
    where: str,
    accelerator: Accelerator,
) -> str:
    weights = parts.model.state_dict()
    tensors = {f"model/{name}": weight for name, weight in weights.items()}
    for number, each in enumerate(passes):
        tensors |= {f"{number}/{name}": value for name, value in tensors_of(each.batch).items()}
    metadata = {
        "update": state.update,
        "epoch": state.epoch,
        "where": where,
        "places": [each.place for each in passes],
        "config": state.config,
    }
    folder = Path(state.config["run"]["output"]) / REPLAYS
    name = f"update-{state.update:09d}-process-{accelerator.process_index}.safetensors"
    # Without the folder writing fails, but only after this process has gathered with the others.
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
    try:
        write_tensors(folder / name, tensors, json.dumps(metadata))
    except OSError as error:  # the NaN matters more; this is reported beside it
        return f"not saved: {error}"
    return f"saved as {folder / name}"
