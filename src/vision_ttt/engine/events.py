"""TensorBoard's event files, written by the thread that has something to write.

torch's SummaryWriter has a thread of its own for it, which ends with a traceback where the folder
vanishes or the disk is full, and tells the caller only at the next point.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

_numbers = itertools.count()


class EventFile:
    """One event file, which a run's earlier ones in the same folder precede."""

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        """Make the file, and its folder where it is missing.

        Args:
            purge_step: points of earlier files from this step on are void: the run resumes there.

        Raises:
            OSError: it cannot be created. The methods below raise it if they cannot write.
        """
        folder.mkdir(parents=True, exist_ok=True)
        place = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._records = RecordWriter((folder / f"events.out.tfevents.{place}").open("wb"))
        self._write(Event(file_version="brain.Event:2"), purge_step)
        self._write(Event(session_log=SessionLog(status=SessionLog.START)), purge_step)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Write one point."""
        point = Summary.Value(tag=name, simple_value=value)
        self._write(Event(summary=Summary(value=[point])), step)

    def flush(self) -> None:
        """Let readers see every point."""
        self._records.flush()

    def close(self) -> None:
        """Write what is left."""
        self._records.close()

    def _write(self, event: Event, step: int) -> None:
        event.wall_time, event.step = time.time(), step
        self._records.write(event.SerializeToString())
