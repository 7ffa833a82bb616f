"""Reading checkpoints of either kind, one file or a folder of parts, each process what it needs.

`torch.distributed.checkpoint` plans which slices of which stored chunk a process reads, so that a
checkpoint can be read by any number of processes, sharded or not. Nothing is unpickled.
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor, distributed
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from vision_ttt.engine.described import read_json
from vision_ttt.engine.digests import KEY, without_digest
from vision_ttt.engine.sharded_files import FORMAT, MANIFEST
from vision_ttt.engine.tensor_files import DTYPES, CheckpointError, Shapes, inspect_tensors
from vision_ttt.file_kinds import UnreadableFile, read_regular

_LARGEST_MANIFEST = 2**28  # bytes


@dataclass(frozen=True)
class StoredTensors:
    """What lies in a checkpoint; the values are still in its files."""

    path: Path
    text: str | None
    """The JSON text; None where there is none."""
    shapes: Shapes
    places: Mapping[MetadataIndex, tuple[Path, torch.Size]]
    """(Name, offsets) of a chunk → the file in which it has this name, and its shape."""


def open_stored(path: Path, *, share: tuple[int, int] = (0, 1)) -> StoredTensors:
    """Check a checkpoint and return what is in it, without its values.

    Args:
        path: a file that `write_tensors` wrote or a folder that `write_sharded` wrote.
        share: (index, count) of the processes that do this together: each reads its share of the
            files through and checks their digests. The checkpoint is whole if no process raises.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        CheckpointError: truncated, damaged, a file is missing, or none of our checkpoints.
    """
    if path.is_dir():
        return _open_folder(path, share)
    index, _ = share
    found = inspect_tensors(path, hashing=index == 0)
    if found.digest is None:
        raise CheckpointError(f"{path} has no SHA-256; it is not the state of a run")
    places = {
        MetadataIndex(name, [0] * len(shape)): (path, shape)
        for name, (_, shape) in found.shapes.items()
    }
    return StoredTensors(path, found.text, found.shapes, places)


def load_stored(stored: StoredTensors, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """Copy stored values into `tensors`; of a DTensor each process reads its own part.

    Args:
        tensors: names and shapes as stored. Written in place.
        alone: this process reads by itself, though there may be others. Otherwise all do.

    Raises:
        CheckpointError: a file cannot be read any more, for some process; raised by all of them.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # alone on purpose
        try:
            dcp.load(
                tensors,
                storage_reader=_Reader(stored),
                planner=planner,
                no_dist=alone or not distributed.is_initialized(),
            )
        except CheckpointException as failed:
            _, (error, _) = min(failed.failures.items(), key=lambda failure: failure[0])
            if not isinstance(error, OSError | SafetensorError):
                raise error from failed
            raise CheckpointError(f"{stored.path} cannot be read: {error}") from error


class _Reader(StorageReader):
    """Reads the planned slices; `torch.distributed.checkpoint` calls the methods in this order."""

    def __init__(self, stored: StoredTensors) -> None:
        self.stored = stored

    def reset(self, checkpoint_id: object = None) -> None:
        pass  # a reader reads one checkpoint

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        for index, (_, shape) in self.stored.places.items():
            chunks[index.fqn].append(ChunkStorageMetadata(index.offset, shape))
        return Metadata(
            {
                name: TensorStorageMetadata(TensorProperties(dtype), shape, chunks[name])
                for name, (dtype, shape) in self.stored.shapes.items()
            }
        )

    def set_up_storage_reader(self, *_args: Any, **_options: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[Path, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.stored.places[item.storage_index][0]].append(item)
        for path, items in by_file.items():
            with safe_open(path, framework="pt") as file:
                for item in items:
                    spans = zip(item.storage_offsets, item.lengths, strict=True)
                    slices = tuple(slice(start, start + length) for start, length in spans)
                    value = file.get_slice(item.storage_index.fqn)[slices]
                    target = planner.resolve_tensor(item)
                    target.copy_(value)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return isinstance(checkpoint_id, Path)


def _open_folder(path: Path, share: tuple[int, int]) -> StoredTensors:
    manifest = _read_manifest(path / MANIFEST)
    try:
        digests = dict(manifest["files"])
        if any(Path(name).name != name for name in digests):
            raise ValueError(f"files {list(digests)} are not all in the folder")
        shapes = {
            name: (DTYPES[tensor["dtype"]], torch.Size(tensor["shape"]))
            for name, tensor in manifest["tensors"].items()
        }
        places = {
            MetadataIndex(name, offsets): (path / file, torch.Size(shape))
            for name, tensor in manifest["tensors"].items()
            for file, offsets, shape in tensor["chunks"]
        }
        text = manifest["text"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error}") from error
    index, count = share
    for number, (name, digest) in enumerate(sorted(digests.items())):
        try:
            found = inspect_tensors(path / name, hashing=number % count == index)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path / name} is missing") from error
        if found.digest != digest:
            raise CheckpointError(f"{path / name} is not the file that {MANIFEST} names")
    return StoredTensors(path, text, shapes, places)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = read_regular(path, _LARGEST_MANIFEST)
        manifest = read_json(content)
        whole = sha256(without_digest(content, manifest[KEY])).hexdigest() == manifest[KEY]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is no checkpoint: it has no {MANIFEST}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnreadableFile as error:
        raise CheckpointError(str(error)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is truncated or damaged: {error}") from error
    if not whole:
        raise CheckpointError(f"{path} is damaged: its content does not have its SHA-256")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {manifest['format']}; {FORMAT} is read")
    return manifest
