"""One optimiser update: forward and backward of each micro-batch, the check, clipping, the step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.parallel import summed
from vision_ttt.engine.sharded_tensors import whole
from vision_ttt.engine.task import Batch, Moment, Task


def seed_pass(place: Sequence[int]) -> None:
    """Seed Python's, NumPy's and torch's generators (all devices) by a tuple of counters.

    All randomness of a run is a function of its seed and of where in the run it is drawn.
    """
    set_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))


@dataclass(frozen=True)
class Pass:
    """A micro-batch on its way through the model, with what repeats it exactly."""

    place: tuple[int, ...]
    """The seed of its randomness: (seed, epoch, number in the epoch, process)."""
    batch: Batch
    """As the model sees it, augmented."""
    moment: Moment
    """When."""
    loss: Tensor
    """Sum over its units, []."""
    units: int
    """That it is the sum of."""


@dataclass(frozen=True)
class Outcome:
    """What an update did, over all processes."""

    loss_sum: float
    """Sum of the units' losses."""
    units: int
    gradient_norm: float
    stop_votes: float
    """Sum of the processes' votes to stop; the run stops if it is above 0."""
    passes: Sequence[Pass]
    """This process's."""

    @property
    def finite(self) -> bool:
        """Whether the weights were updated: loss and gradient hold no NaN or infinity."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.gradient_norm)

    @property
    def loss(self) -> float:
        """Mean loss of a unit."""
        return self.loss_sum / max(self.units, 1)


@dataclass
class Step:
    """Makes one update after the other."""

    config: TrainConfig
    accelerator: Accelerator
    model: nn.Module
    shared: nn.Module
    """What to call: the model as several processes share it."""
    optimizer: torch.optim.Optimizer
    task: Task
    stop_vote: Callable[[], float]

    def __post_init__(self) -> None:
        compiled = self.config.machine.compile
        self.forward = torch.compile(self.shared) if compiled else self.shared

    def __call__(
        self, batches: Sequence[Batch], epoch: int, first_pass: int, moment: Moment
    ) -> Outcome:
        """Update the weights from an update's micro-batches, unless something is not finite.

        The gradient is that of the mean loss over all units of the update, in whichever
        micro-batches and processes they are.
        """
        self.optimizer.zero_grad()  # an update that was skipped left its gradients to be looked at
        passes = []
        for number, batch in enumerate(batches, start=first_pass):
            place = (self.config.run.seed, epoch, number, self.accelerator.process_index)
            with self.accelerator.accumulate(self.shared):
                passes.append(self._pass(batch, place, moment))
        for held in self.task.held_parameters(moment):
            held.grad = None
        weights = [p for p in self.model.parameters() if p.grad is not None]
        norm = whole(get_total_norm([p.grad for p in weights]))
        losses = torch.stack([each.loss for each in passes]).sum()
        # The only wait for the device in an update; the check has to come before the step, so that
        # neither the weights nor a checkpoint gets to see a NaN.
        loss_sum, norm_value = torch.stack([losses, norm]).tolist()
        units = sum(each.units for each in passes)
        loss_sum, units, votes = summed([loss_sum, units, self.stop_vote()], self.accelerator)
        # The passes have divided by the items of a batch, before the number of units was known.
        scale = self.config.optimisation.batch_size / units if units else 1.0
        outcome = Outcome(loss_sum, int(units), norm_value * scale, votes, passes)
        if outcome.finite:
            if scale != 1:
                torch._foreach_mul_([p.grad for p in weights], scale)
            if self.config.optimisation.clip_norm > 0:
                clip_grads_with_norm_(weights, self.config.optimisation.clip_norm, norm * scale)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return outcome

    def _pass(self, batch: Batch, place: tuple[int, ...], moment: Moment) -> Pass:
        # The randomness of a forward pass follows from its place in the run, so that a resumed run
        # needs no generator's state.
        seed_pass(place)
        batch = send_to_device(batch, self.accelerator.device, non_blocking=True)
        batch = self.task.augment(batch)
        try:
            loss, units = self.task.loss(self.forward, batch, moment)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):  # what batch norms of PyTorch say
                raise
            raise ConfigError(
                "batch_size / accumulation_steps / processes is 1; it must be at least 2, as one"
                f" item gives a batch norm of {type(self.model).__name__} one value per channel"
            ) from error
        items = self.config.optimisation.micro_batch_size / self.accelerator.num_processes
        self.accelerator.backward(loss / items)
        return Pass(place, batch, moment, loss.detach(), units)
