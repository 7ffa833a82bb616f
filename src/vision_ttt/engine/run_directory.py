"""A run's directory: what it is resumed from, what it keeps, what an overwritten run leaves."""

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
import yaml

from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.files import remove_parts, write_text
from vision_ttt.engine.logs import environment
from vision_ttt.engine.state import SavedRun, read_state, save_state
from vision_ttt.engine.tensor_files import CheckpointError

_LOGGER = logging.getLogger(__name__)
FORMER = "former"
"""Sub-folder of a run directory for what an overwritten run left."""
CHECKPOINTS = "checkpoints"
"""Sub-folder of a run directory for the states one resumes from, update-NUMBER.safetensors."""
Resume = bool | Literal["auto"]
# What a resumed run may change without becoming another run.
_FREE_FIELDS = {
    *("output", "num_workers", "loader_timeout", "skip_bad", "sharding"),
    *("checkpoint_every", "keep_checkpoints", "wandb_project"),
}


def open_run(config: TrainConfig, *, resume: Resume, overwrite: bool) -> SavedRun | None:
    """Return the state to go on from, None for a new run.

    The newest checkpoint that is whole counts; damaged ones are named.

    Raises:
        ConfigError: the directory holds a run and neither `resume` nor `overwrite` is set, or both
            are; the run to resume has another config.
        FileNotFoundError: `resume` is true and there is nothing to resume.
        CheckpointError: no checkpoint of the run is whole.
    """
    run_dir = Path(config.output)
    if resume and overwrite:
        raise ConfigError("resume and overwrite exclude each other; choose one")
    found = checkpoints(run_dir)
    if found and not resume and not overwrite:
        raise ConfigError(
            f"{run_dir} already holds a run: resume it, overwrite it, or choose another output"
        )
    if resume is True and not found:
        folder = str(run_dir / CHECKPOINTS)
        raise FileNotFoundError(2, "Nothing to resume: no checkpoint in", folder)
    if not resume or not found:
        return None
    saved = _newest_whole(found)
    _check_same_run(run_dir, saved.state.config, config)
    return saved


def checkpoints(run_dir: Path) -> list[Path]:
    """Return a run's state files, newest first."""
    return sorted((run_dir / CHECKPOINTS).glob("update-*.safetensors"), reverse=True)


def is_finished(config: TrainConfig) -> bool:
    """Whether the run in `config.output` has trained all of its epochs."""
    path = Path(config.output) / "metrics.json"
    if not path.is_file():
        return False
    return len(json.loads(path.read_text(encoding="utf-8"))["epochs"]) >= config.epochs


def save_checkpoint(run_dir: Path, saved: SavedRun, keep: int) -> Path:
    """Write a state file and remove all but the `keep` newest.

    Raises:
        OSError: the disk is full or the folder cannot be written; the former ones are kept.
    """
    folder = run_dir / CHECKPOINTS
    folder.mkdir(exist_ok=True)
    path = folder / f"update-{saved.state.update:09d}.safetensors"
    save_state(path, saved)
    # Later ones are left of a former attempt, which went on from this one for their damage.
    later = [other for other in checkpoints(run_dir) if other.name > path.name]
    for other in [*later, *checkpoints(run_dir)[len(later) + keep :]]:
        other.unlink(missing_ok=True)
    return path


def begin_directory(
    run_dir: Path, config: TrainConfig, device: torch.device, *, anew: bool
) -> None:
    """Make the run directory, with config.yaml and environment.json.

    With `anew`, move what a former run left into the sub-folder former: none of it is lost should
    this one fail, nor passes for this one's. What lay in former before goes.

    Raises:
        OSError: the directory cannot be made or written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    remove_parts(run_dir, run_dir / CHECKPOINTS)
    if anew:
        _set_aside(run_dir)
    header = "# The run's whole configuration; a recipe like any other.\n"
    text = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)
    write_text(run_dir / "config.yaml", header + text)
    write_text(run_dir / "environment.json", json.dumps(environment(device), indent=2) + "\n")


def _newest_whole(found: list[Path]) -> SavedRun:
    damages = []
    for path in found:
        try:
            saved = read_state(path)
        except CheckpointError as error:
            damages.append(str(error))
            continue
        for damage in damages:
            _LOGGER.warning("%s; going on from %s", damage, path.name)
        return saved
    raise CheckpointError(f"no checkpoint is whole: {'; '.join(damages)}")


def _check_same_run(run_dir: Path, former: dict[str, object], config: TrainConfig) -> None:
    # As the state file holds them; a field that the former version did not know had its default.
    now, default = (json.loads(json.dumps(asdict(each))) for each in (config, TrainConfig()))
    former = {**default, **former}
    changed = [
        f"{name} {former[name]!r} -> {value!r}"
        for name, value in now.items()
        if former[name] != value and name not in _FREE_FIELDS
    ]
    if changed:
        raise ConfigError(f"{run_dir} cannot be resumed with another config: {', '.join(changed)}")


def _set_aside(run_dir: Path) -> None:
    left = [entry for entry in run_dir.iterdir() if entry.name != FORMER]
    if not left:
        return
    former = run_dir / FORMER
    if former.exists():
        shutil.rmtree(former)
    former.mkdir()
    for entry in left:
        entry.rename(former / entry.name)
