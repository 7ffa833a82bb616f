"""A request to stop, by Ctrl-C or a scheduler's SIGTERM: the loop ends between two updates."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vision_ttt.errors import Interrupted

# More than all processes' votes for SIGINT.
_TERM_VOTE = 2.0**20


class Preempted(Interrupted):
    """Training was asked by SIGTERM to make room, and left a complete checkpoint."""


class StopRequest:
    """Whether a signal asked the process to stop; the loop looks between updates."""

    def __init__(self) -> None:
        self.signal = 0
        """The signal that asked, 0 for none."""

    @property
    def vote(self) -> float:
        """What is summed over the processes, so that they stop together and for one reason."""
        return {0: 0.0, signal.SIGINT: 1.0, signal.SIGTERM: _TERM_VOTE}[self.signal]

    def error(self, votes: float, message: str) -> Interrupted:
        """The exception to end the run with, by the processes' summed votes."""
        return Preempted(message) if votes >= _TERM_VOTE else Interrupted(message)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C, and every SIGTERM, into a `StopRequest`.

    The second Ctrl-C interrupts at once. Schedulers may send SIGTERM repeatedly before they kill.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # signals go to the main thread alone
        return
    former = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, _frame: FrameType | None) -> None:
        request.signal = number
        if number == signal.SIGINT:
            signal.signal(number, former[number])

    for each in former:
        signal.signal(each, handle)
    try:
        yield request
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)
