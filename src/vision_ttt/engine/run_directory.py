"""A run's directory: its checkpoints, and what an overwritten run leaves."""

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from vision_ttt.engine.checkpoint import CHECKPOINTS, WEIGHTS_FILE
from vision_ttt.engine.config import ConfigError, TrainConfig, section_types
from vision_ttt.engine.locks import LOCK_FILES, alone_in
from vision_ttt.engine.logs import environment
from vision_ttt.engine.parallel import failing_together, first_given
from vision_ttt.engine.section import defaults
from vision_ttt.engine.state import SavedRun, StoredRun, check_fits, open_state, save_state
from vision_ttt.engine.tensor_files import CheckpointError
from vision_ttt.file_kinds import UnreadableFile, read_regular
from vision_ttt.files import is_part, remove_parts, write_text

_LOGGER = logging.getLogger(__name__)
_LARGEST_FILE = 2**28  # bytes of metrics and config
CONFIG_FILE = "config.yaml"
_HEADER = "# The run's whole configuration; a recipe like any other.\n"
FORMER = "former"
"""Sub-folder of a run directory for what an overwritten run left."""
_NAME = re.compile(r"update-.*\.safetensors")
Resume = bool | Literal["auto"]
# What a resumed run may change without becoming another run.
_FREE_FIELDS = {
    *("run.output", "run.skip_bad", "run.checkpoint_every", "run.keep_checkpoints"),
    *("run.wandb_project", "machine.num_workers", "machine.loader_timeout", "machine.sharding"),
    *("machine.composite_ops", "machine.keep_freed_memory"),
}


@contextmanager
def only_run(run_dir: Path, accelerator: Accelerator) -> Iterator[None]:
    """Lock a run's directory, so that no other run writes there at the same time.

    Of a run's several processes the main one takes the lock, and the others wait until it has it.

    Raises:
        ConfigError: another run is at work there.
        OSError: the directory cannot be made or written.
    """
    with ExitStack() as held:
        if accelerator.is_main_process:
            try:
                held.enter_context(alone_in(run_dir, wait=False, lock=LOCK_FILES[1]))
            except BlockingIOError as error:
                raise ConfigError(
                    f"another run is at work in {run_dir}; wait for it, or choose another --output"
                ) from error
        accelerator.wait_for_everyone()
        yield


def open_run(config: TrainConfig, *, resume: Resume, overwrite: bool) -> list[Path]:
    """Return the checkpoints to resume from, newest first, see `newest_whole`; none for a new run.

    Raises:
        ConfigError: the directory holds a run and neither `resume` nor `overwrite` is set, or both
            are; or `overwrite` is set and the directory holds files, but no run.
        FileNotFoundError: `resume` is true and there is nothing to resume.
        OSError: the directory cannot be read.
    """
    run_dir = Path(config.run.output)
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; choose one")
    found = checkpoints(run_dir)
    if found and not resume and not overwrite:
        raise ConfigError(
            f"{run_dir} already holds a run; give --resume auto to resume it, --overwrite to start"
            " a new run, or another --output"
        )
    if overwrite and not found and not _holds_config(run_dir) and _left(run_dir):
        raise ConfigError(
            f"{run_dir} holds files, but no run to overwrite; choose another --output"
        )
    if resume is True and not found:
        folder = str(run_dir / CHECKPOINTS)
        raise FileNotFoundError(2, "Nothing to resume: no checkpoint in", folder)
    return found if resume else []


def newest_whole(
    found: Sequence[Path], config: TrainConfig, model: nn.Module, accelerator: Accelerator
) -> StoredRun:
    """Return the newest of some checkpoints that is whole and of this very run.

    The main process reads a checkpoint through, and all take the same one. Its tensors are read by
    `restore`, which each process calls when the model is divided among them.

    Args:
        found: newest first; there must be one.
        config: of the run.
        model: as the run trains it, before it is shared; stays as it is.

    Raises:
        ConfigError: the run to resume has another config. Its checkpoint is not skipped, because
            later saves would remove it.
        CheckpointError: no checkpoint of the run is whole.
    """
    damages: list[str] = []
    for path in broadcast_object_list([list(found)])[0]:
        run, damage = None, None
        try:
            run = open_state(path, hashing=accelerator.is_main_process)
        except (CheckpointError, FileNotFoundError) as error:
            damage = str(error)
        damage = first_given(damage)
        if damage is None:
            # From here on every process sees the same.
            _check_same_run(path.parent.parent, run.state.config, config)
            try:
                check_fits(run, model, averaged=config.optimisation.ema_decay > 0)
            except ValueError as error:
                damage = f"{path} is not the state of this run: {error}"
        if damage is None:
            if accelerator.is_main_process:
                for each in damages:
                    _LOGGER.warning("%s; going on from %s", each, path.name)
                _LOGGER.info("resuming from %s, update %d", path, run.state.update)
            return run
        damages.append(damage)
    raise CheckpointError(f"no checkpoint is whole: {'; '.join(damages)}")


def checkpoints(run_dir: Path) -> list[Path]:
    """Return a run's checkpoints, newest first, and whatever has such a name.

    Raises:
        OSError: the folder of checkpoints cannot be read, or is none.
    """
    folder = run_dir / CHECKPOINTS
    if not os.path.lexists(folder):
        return []
    names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    return [folder / name for name in sorted(names, reverse=True)]


def is_finished(config: TrainConfig) -> bool:
    """Whether the run in `config.run.output` has come to its end.

    Raises:
        ConfigError: it has, but is a run of another config.
    """
    run_dir = Path(config.run.output)
    try:
        metrics = json.loads(read_regular(run_dir / "metrics.json", _LARGEST_FILE))
        former = yaml.safe_load(read_regular(run_dir / CONFIG_FILE, _LARGEST_FILE))
        finished = bool(metrics["finished"]) and isinstance(former, dict)
    except (FileNotFoundError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return False  # not there yet, or damaged; the checkpoints are what counts
    if finished:
        _check_same_run(run_dir, former, config)
    return finished


def save_checkpoint(run_dir: Path, saved: SavedRun, keep: int, accelerator: Accelerator) -> Path:
    """Write a checkpoint and remove all but the `keep` newest; every process has to call it.

    Raises:
        OSError: the disk is full or the folder cannot be written, for some process; raised by all
            of them. The former checkpoints are kept.
    """
    folder = run_dir / CHECKPOINTS
    path = folder / f"update-{saved.state.update:09d}.safetensors"
    with failing_together():
        if accelerator.is_main_process:
            folder.mkdir(exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                _remove(path)
    with failing_together():
        save_state(path, saved, writes=accelerator.is_main_process)
        if accelerator.is_main_process:
            _remove_others(run_dir, path, keep)
    return path


def begin_directory(
    run_dir: Path, config: TrainConfig, device: torch.device, *, anew: bool
) -> None:
    """Make the run directory, with config.yaml and environment.json.

    With `anew`, move the files of a former run into the sub-folder former, which replaces its
    content. They are not lost if the new run fails, and cannot be mistaken for the new run's files.
    Where that sub-folder holds a run, a run that ended before its first checkpoint is not kept.

    Raises:
        OSError: the directory cannot be made or written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    remove_parts(run_dir, run_dir / CHECKPOINTS)
    if anew:
        _set_aside(run_dir)
    text = yaml.safe_dump(config.as_dict(), sort_keys=False, allow_unicode=True)
    write_text(run_dir / CONFIG_FILE, _HEADER + text)
    write_text(run_dir / "environment.json", json.dumps(environment(device), indent=2) + "\n")


def _remove_others(run_dir: Path, path: Path, keep: int) -> None:
    """Remove all checkpoints but the newest one, `path`, and the `keep` - 1 before it."""
    found = [other for other in checkpoints(run_dir) if other != path]
    # Those of later updates were left by a former attempt and were damaged, or else this run would
    # have resumed from them.
    later = [other for other in found if other.name > path.name]
    for other in [*later, *found[len(later) + keep - 1 :]]:
        _remove(other)


def _remove(path: Path) -> None:
    """Remove a checkpoint; a folder of such a name is not ours: it is renamed and kept."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    numbers = (f".aside-{number}" for number in itertools.count(1))
    free = (path.with_name(path.name + end) for end in numbers)
    path.rename(next(each for each in free if not os.path.lexists(each)))


def _check_same_run(run_dir: Path, former: dict[str, Any], config: TrainConfig) -> None:
    changed = differences(former, config, besides=_FREE_FIELDS)
    if changed:
        raise ConfigError(
            f"{run_dir} cannot be resumed with another config: {', '.join(changed)}. Give the"
            " former values, or begin another run by --output, with --initial-weights"
            f" {run_dir / WEIGHTS_FILE} to start from its weights"
        )


def differences(
    former: Mapping[str, Any], config: TrainConfig, *, besides: Collection[str]
) -> list[str]:
    """Return "SECTION.FIELD former -> now" for each field in which two configs differ.

    Args:
        former: what `TrainConfig.as_dict` returned, read from JSON; a field that the former version
            did not know had its default.
        besides: fields that do not count.
    """
    own = {name: defaults(kind) for name, kind in section_types(type(config.task)).items()}
    was, now = (_by_name(each, own) for each in (former, json.loads(json.dumps(config.as_dict()))))
    return [
        f"{name} {was[name]!r} -> {value!r}"
        for name, value in now.items()
        if was[name] != value and name not in besides
    ]


def _by_name(values: Mapping[str, Any], own: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a config's values by SECTION.FIELD, the defaults `own` for what it does not hold."""
    named = {}
    for section, fields in own.items():
        given = values.get(section)
        for field, value in {**fields, **(given if isinstance(given, dict) else {})}.items():
            named[f"{section}.{field}"] = value
    return named


def _holds_config(run_dir: Path) -> bool:
    """Whether a run began in a directory: others may have a config.yaml, too."""
    try:
        return read_regular(run_dir / CONFIG_FILE, _LARGEST_FILE).startswith(_HEADER.encode())
    except (FileNotFoundError, UnreadableFile):
        return False


def _left(run_dir: Path) -> list[Path]:
    """What lies in a directory, but for a run's locks, its unfinished files and the former run."""
    if not run_dir.is_dir():
        return []
    apart = (FORMER, *LOCK_FILES)
    return [each for each in run_dir.iterdir() if each.name not in apart and not is_part(each)]


def _set_aside(run_dir: Path) -> None:
    former, left = run_dir / FORMER, _left(run_dir)
    if former.exists() and not checkpoints(run_dir) and not (run_dir / WEIGHTS_FILE).exists():
        for name in ("tensorboard", "non-finite"):
            shutil.rmtree(run_dir / name, ignore_errors=True)
        return
    if not left:
        return
    if former.exists():
        shutil.rmtree(former)
    former.mkdir()
    # Until all is moved, the config tells that this is a run.
    for entry in sorted(left, key=lambda each: each.name == CONFIG_FILE):
        entry.rename(former / entry.name)
