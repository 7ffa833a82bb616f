"""The scratch folder: tokens in files, and a record of how far the run is."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vision_ttt.engine.locks import alone_in
from vision_ttt.engine.tensor_files import read_tensors, write_tensors
from vision_ttt.whole.errors import WholePictureError
from vision_ttt.whole.plan import Plan, in_units

RECORD = "record.safetensors"
FILES = ("tokens", "side")


@dataclass
class Progress:
    """The progress of a run, with everything it needs to resume besides the stored tokens."""

    sweep: int = 0
    """The number of complete sweeps. The embedding of the patches is the first."""
    bands: int = 0
    """The number of complete bands of the next sweep."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The sweep's state, and class tokens."""
    sums: dict[str, list[int]] = field(default_factory=dict)
    """File → the checksum of each of its bands."""


class Scratch:
    """The folder of one run, from which a later run of the same model on the same picture resumes.

    After a crash of the machine its files may be damaged; their checksums detect this.

    Args:
        folder: created if it is missing.
        identity: name → value of what identifies the run. It is recorded, and compared on resuming.
        plan: of the run.

    Raises:
        ValueError: another run's files are in the folder, or they are damaged, or the disk has no
            room for the plan.
        BlockingIOError: another process works in it.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], plan: Plan) -> None:
        self.folder, self.identity, self.record = folder, dict(identity), folder / RECORD
        self._held = contextlib.ExitStack()
        try:
            self._held.enter_context(alone_in(folder, wait=False))
        except BlockingIOError as error:
            raise BlockingIOError(
                error.errno, "another process works in it", str(folder)
            ) from error
        try:
            self.progress = self._recorded()
            self.resumes = self.progress.sweep > 0 or self.progress.bands > 0
            if not self.resumes:
                self._check_room(plan)
                self.write()  # before the stores' files, which the record then identifies
        except BaseException:
            self.close()
            raise

    def write(self) -> None:
        """Write down the progress."""
        text = {
            "identity": self.identity,
            "sweep": self.progress.sweep,
            "bands": self.progress.bands,
            "sums": self.progress.sums,
        }
        write_tensors(self.record, self.progress.tensors, json.dumps(text), synced=False)

    def close(self) -> None:
        """Release the folder, and keep its files."""
        self._held.close()

    def remove(self) -> None:
        """Remove the run's files, and the folder where nothing else is in it."""
        for name in (RECORD, *FILES):
            (self.folder / name).unlink(missing_ok=True)
        self.close()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _recorded(self) -> Progress:
        if not self.record.exists():
            found = [name for name in FILES if (self.folder / name).exists()]
            if found:
                raise WholePictureError(
                    f"the scratch folder {self.folder} holds {', '.join(found)} and no {RECORD}: "
                    "nothing says which run they are of; remove them or give another folder"
                )
            return Progress()
        tensors, text = read_tensors(self.record)
        try:
            said = json.loads(text or "")
            recorded = Progress(said["sweep"], said["bands"], tensors, said["sums"])
            of = said["identity"]
        except (ValueError, KeyError, TypeError) as error:
            raise WholePictureError(
                f"{self.record} is no record of a run on a whole picture"
            ) from error
        differing = sorted(
            name
            for name in {*of, *self.identity}
            if of.get(name) != json.loads(json.dumps(self.identity.get(name)))
        )
        if differing:
            raise WholePictureError(
                f"the scratch folder {self.folder} is of another run: {', '.join(differing)} "
                "differ; remove the folder or give another one"
            )
        return recorded

    def _check_room(self, plan: Plan) -> None:
        free = shutil.disk_usage(self.folder).free
        if plan.scratch > free:
            raise WholePictureError(
                f"the run needs {in_units(plan.scratch)} in the scratch folder {self.folder}; "
                f"its disk has {in_units(free)} of room"
            )


@contextlib.contextmanager
def kept_on_errors(scratch: Scratch | None) -> Iterator[None]:
    """Remove the scratch folder at the end. If an error ends the run, keep it for a later run."""
    try:
        yield
    except BaseException:
        if scratch is not None:
            scratch.close()
        raise
    if scratch is not None:
        scratch.remove()
