"""What happens in the middle of training: numbers that are not finite, a request to stop."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from vision_ttt.errors import Interrupted, UserError

# More than all processes' votes for SIGINT.
_TERM_VOTE = 2.0**20


class NonFiniteError(UserError, ArithmeticError):
    """Training met NaN or infinity. `update` counts from 0; `where` names the place."""

    def __init__(self, update: int, epoch: int, where: str, kept: str) -> None:
        super().__init__(
            f"training stopped at update {update} (epoch {epoch}): {where} is not finite; {kept}"
        )
        self.update = update
        self.epoch = epoch
        self.where = where


def find_non_finite(
    model: nn.Module, forward: Callable[[], Any], tensors: Mapping[str, Tensor]
) -> str:
    """Return where NaN or infinity first appears: the batch, a module's output, or a gradient.

    Args:
        model: the model after the backward pass of the offending batch.
        forward: runs `model` on that batch again.
        tensors: the batch's, by name.
    """
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            return f"the batch's {name}"
    # By the weights first: where an update made them so, the next module's output is a symptom.
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            return f"parameter {name!r}"
    found = _first_output(model, forward)
    if found is not None:
        return f"the output of module {found!r}"
    # Gradients flow from the loss to the input, so the last parameter's appeared first.
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not torch.isfinite(weight.grad).all():
            return f"the gradient of parameter {name!r}"
    return "the loss or the gradient's norm"


def _first_output(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not found and not _is_finite(output):
                found.append(name)

        return hook

    # A module's hook runs after its children's: the innermost module is named.
    handles = [
        module.register_forward_hook(watch(name or type(model).__name__))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _is_finite(output: Any) -> bool:
    if isinstance(output, Tensor):
        return not output.is_floating_point() or bool(torch.isfinite(output).all())
    if isinstance(output, dict):
        return all(_is_finite(value) for value in output.values())
    if isinstance(output, list | tuple):
        return all(_is_finite(value) for value in output)
    return True


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
