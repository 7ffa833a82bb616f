"""Sharded tensors and a JSON text in a folder: one safetensors file per process, and a manifest.

    update-000000008/
        part-00000.safetensors    what process 0 holds, in the form of `tensor_files`
        part-00001.safetensors
        manifest.json             which part of which tensor is where, and each file's SHA-256

`torch.distributed.checkpoint` plans which process writes what, and collects the processes' errors;
the storage is ours. PyTorch's own writers keep their index as a pickle (`FileSystemWriter`), or no
index and no digests, with each process's part serialised in memory before it is written
(`HuggingFaceStorageWriter`).
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from vision_ttt.engine.digests import KEY, ZEROS, with_digest
from vision_ttt.engine.tensor_files import DTYPE_NAMES, in_file_order, stream_tensors
from vision_ttt.files import sync_file, sync_folder, write_bytes

MANIFEST = "manifest.json"
"""Name of the file that lists a folder's other files and the tensors in them."""
FORMAT = 1
"""Version of the manifest's form."""
_PART = "part-{:05d}.safetensors"


def write_sharded(path: Path, tensors: Mapping[str, Tensor], text: str) -> None:
    """Write sharded tensors and `text` as the folder `path`, which appears whole or not at all.

    Every process calls this with its parts of the same tensors, and writes only those. The folder
    gets its name when every file is on the disk, and has it when this returns, on every process.

    Writing is synchronous. An asynchronous write has to copy the state first, because the next
    update changes it: that takes as much memory as the shard, on the CPU in any case. This takes
    one tensor's: 3 MB beside a shard of 806 MB (`tests/engine/sharded_memory.py`).

    Args:
        path: must not exist.

    Raises:
        OSError: the disk is full or the folder cannot be written, for some process; raised by all
            of them. Nothing is left at `path`.
    """
    writer = _FolderWriter(path, text)
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    try:
        dcp.save(dict(tensors), storage_writer=writer, planner=planner)
    except CheckpointException as failed:
        if writer.is_coordinator:
            shutil.rmtree(writer.unfinished, ignore_errors=True)
        _raise_first(failed, path)


def is_sharded_folder(path: Path) -> bool:
    """Whether `path` is a folder, maybe damaged, with nothing in it but what we write there."""
    if not path.is_dir() or path.is_symlink():
        return False
    return all(name == MANIFEST or fnmatch(name, "part-*.safetensors") for name in os.listdir(path))


class _FolderWriter(StorageWriter):
    """Writes the planned parts; `torch.distributed.checkpoint` calls the methods in this order."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.unfinished = path.with_name(f".{path.name}.part")  # the same on every process
        self.is_coordinator = False

    def reset(self, checkpoint_id: object = None) -> None:
        pass  # a writer writes one checkpoint

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_options: Any) -> None:
        self.is_coordinator = is_coordinator
        if not is_coordinator:
            return
        if self.unfinished.exists():
            shutil.rmtree(self.unfinished)
        self.unfinished.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            replace(plan, storage_data=_PART.format(process)) for process, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # A process has no part of a tensor that has fewer rows than there are processes.
        items = {
            each.index.fqn: each for each in plan.items if each.tensor_data.chunk.sizes.numel()
        }
        shapes = in_file_order(
            {
                name: (each.tensor_data.properties.dtype, each.tensor_data.chunk.sizes)
                for name, each in items.items()
            }
        )
        results = []
        if items:
            values = (planner.resolve_data(items[name]) for name in shapes)
            with (self.unfinished / plan.storage_data).open("wb") as file:
                digest = stream_tensors(file, shapes, values, "null")
                sync_file(file)
            results = [
                WriteResult(each.index, _bytes(each), (plan.storage_data, digest))
                for each in items.values()
            ]
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [each for of_process in results for each in of_process]
        places = {each.index: each.storage_data[0] for each in written}
        manifest = {
            KEY: ZEROS,
            "format": FORMAT,
            "text": self.text,
            "files": dict(each.storage_data for each in written),
            "tensors": _described(metadata, places),
        }
        content = json.dumps(manifest, separators=(",", ":")).encode()
        digest = sha256(content).hexdigest()
        write_bytes(self.unfinished / MANIFEST, with_digest(content, digest))
        os.replace(self.unfinished, self.path)
        sync_folder(self.path.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return isinstance(checkpoint_id, Path)


def _bytes(item: WriteItem) -> int:
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _described(
    metadata: Metadata, places: Mapping[MetadataIndex, str]
) -> dict[str, dict[str, Any]]:
    """The manifest's entry for each tensor; a chunk is its file, offsets and shape."""
    return {
        name: {
            "dtype": DTYPE_NAMES[tensor.properties.dtype],
            "shape": tensor.size,
            "chunks": [
                (places[MetadataIndex(name, chunk.offsets)], chunk.offsets, chunk.sizes)
                for chunk in tensor.chunks
                if chunk.sizes.numel()
            ],
        }
        for name, tensor in metadata.state_dict_metadata.items()
    }


def _raise_first(failed: CheckpointException, path: Path) -> NoReturn:
    """Raise the error of the first process that has one; the same on every process."""
    _, (error, _) = min(failed.failures.items(), key=lambda failure: failure[0])
    if not isinstance(error, OSError):
        raise error
    reason = f"{error.strerror or error} (nothing was written; the former checkpoints are kept)"
    raise OSError(error.errno, reason, str(path)) from error
