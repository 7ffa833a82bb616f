"""One optimiser update: forward and backward of each micro-batch, the check, clipping, the step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from timm.data import Mixup
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from vision_ttt.data.loading import Batch
from vision_ttt.engine.config import TrainConfig
from vision_ttt.engine.parallel import summed
from vision_ttt.engine.seeds import seed_pass
from vision_ttt.engine.sharded_tensors import whole
from vision_ttt.engine.tasks import Task


@dataclass(frozen=True)
class Pass:
    """A micro-batch on its way through the model, with what repeats it exactly."""

    place: tuple[int, ...]
    """The seed of its randomness: (seed, epoch, number in the epoch, process)."""
    images: Tensor
    """[B, 3, H, W], augmented and mixed."""
    targets: Tensor
    """Class indices [B], or probabilities [B, C] after mixing."""
    indices: Tensor
    """The images' places in the training set, [B]."""
    loss: Tensor
    """Sum of the images' losses, []."""


@dataclass(frozen=True)
class Outcome:
    """What an update did, over all processes."""

    loss_sum: float
    """Sum of the images' losses: of a classifier cross-entropies, in nats."""
    images: int
    gradient_norm: float
    stop_votes: float
    """Of the processes; above 0, they were asked to stop."""
    passes: Sequence[Pass]
    """This process's."""

    @property
    def finite(self) -> bool:
        """Whether the weights were updated: loss and gradient hold no NaN or infinity."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.gradient_norm)

    @property
    def loss(self) -> float:
        """Mean loss of the images."""
        return self.loss_sum / max(self.images, 1)


class Step:
    """Makes one update after the other."""

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        model: nn.Module,
        shared: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Task,
        mix: Mixup | None,
        stop_vote: Callable[[], float],
    ) -> None:
        """Train `model`; `shared` is what to call, the model as several processes share it."""
        self.config = config
        self.accelerator = accelerator
        self.model = model
        self.shared = shared
        self.forward = torch.compile(shared) if config.compile else shared
        self.optimizer = optimizer
        self.task = task
        self.mix = mix
        self.stop_vote = stop_vote

    def __call__(self, batches: Sequence[Batch], epoch: int, first_pass: int) -> Outcome:
        """Update the weights from an update's micro-batches, unless something is not finite.

        The gradient is that of the images' summed loss divided by the batch size, whether or not
        bad images are missing from it.
        """
        self.optimizer.zero_grad()  # an update that was skipped left its gradients to be looked at
        passes = []
        for number, batch in enumerate(batches, start=first_pass):
            place = (self.config.seed, epoch, number, self.accelerator.process_index)
            with self.accelerator.accumulate(self.shared):
                passes.append(self._pass(batch, place))
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = whole(get_total_norm(gradients))
        losses = torch.stack([each.loss for each in passes]).sum()
        # The only wait for the device in an update; the check has to come before the step, so that
        # neither the weights nor a checkpoint gets to see a NaN.
        loss_sum, norm_value = torch.stack([losses, norm]).tolist()
        images = sum(len(each.images) for each in passes)
        loss_sum, images, votes = summed([loss_sum, images, self.stop_vote()], self.accelerator)
        outcome = Outcome(loss_sum, int(images), norm_value, votes, passes)
        if outcome.finite:
            if self.config.clip_norm > 0:
                clip_grads_with_norm_(self.model.parameters(), self.config.clip_norm, norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return outcome

    def _pass(self, batch: Batch, place: tuple[int, ...]) -> Pass:
        # The randomness of a forward pass follows from its place in the run, so that a resumed run
        # needs no generator's state.
        seed_pass(place)
        device = self.accelerator.device
        images, targets, indices = (
            batch[name].to(device, non_blocking=True) for name in ("images", "targets", "indices")
        )
        if self.mix is not None:
            even = len(images) // 2 * 2  # a bad image may have left an odd number
            images, targets, indices = images[:even], targets[:even], indices[:even]
            if even:
                images, targets = self.mix(images, targets)
        loss = self.task.loss(self.forward, images, targets)
        share = self.config.micro_batch_size / self.accelerator.num_processes
        self.accelerator.backward(loss / share)
        return Pass(place, images, targets, indices, loss.detach())
