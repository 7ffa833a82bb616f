"""What a training run is: frozen dataclasses, nested by who owns them.

The task owns its own section and that of its data, which its package declares; the others are the
engine's. Recipes are YAML files of the same shape.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vision_ttt.engine.section import (
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    ConfigError,
    Range,
    Section,
    number,
    refuse_unused,
)
from vision_ttt.errors import UserError

if TYPE_CHECKING:  # they need PyTorch
    import torch
    from torch import nn

    from vision_ttt.engine.checkpoint import ModelMetadata
    from vision_ttt.engine.task import Predictor, Task

__all__ = [
    "ConfigError",
    "MachineSection",
    "ModelSection",
    "OptimisationSection",
    "RunSection",
    "TaskSection",
    "TrainConfig",
]

MOST_WORKERS = 256
"""Processes that prepare batches, per training process; more are a typing error."""


@dataclass(frozen=True)
class TaskSection(Section, ABC):
    """What a run trains for; each task subclasses it, and `open` leads to all that the task is."""

    SHORT: ClassVar[str] = "task"

    name: str
    """Name of the task; a subclass says `Literal[NAME]` and has it as its default."""

    DATA: ClassVar[type[Section]]
    """The section `data` of a run of this task."""
    HOLDS: ClassVar[str]
    """What a checkpoint of this task holds, and which commands read it, for messages."""
    PACKABLE: ClassVar[bool] = True
    """Whether `vision_ttt.for_inference` may pack the task's models: whether all that a module of
    theirs does with its linear layers is to call them, and their results are tensors."""

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError unless this section goes with the rest of `config`."""

    def check_share(self, size: int) -> None:
        """Raise ConfigError unless one process can train on `size` items of a micro-batch."""

    @abstractmethod
    def open(self, config: TrainConfig) -> Task:
        """Open the data of a run and return its task.

        Raises:
            UserError: the data cannot be used, or the config does not fit them.
        """

    @classmethod
    def stands_for(cls, metadata: ModelMetadata) -> tuple[str, ...]:
        """Return the names of other tasks whose models a checkpoint of this task may stand for."""
        return ()

    @classmethod
    @abstractmethod
    def rebuild(cls, metadata: ModelMetadata) -> nn.Module:
        """Build the model that a checkpoint of this task describes, randomly initialised.

        Raises:
            ValueError, KeyError, TypeError: the description is damaged.
        """

    @classmethod
    def reopen(
        cls,
        metadata: ModelMetadata,
        changes: Mapping[str, Any],
        *,
        part: str,
        precision: str,
        num_workers: int,
    ) -> Task:
        """Return the task of a checkpoint, its test set a part of the data, to evaluate its model.

        Args:
            changes: fields of the section `data` that replace the checkpoint's.
            part: "test", "train" or "all".
            precision, num_workers: as in :class:`MachineSection`.

        Raises:
            UserError: the data cannot be used, or the task has no such evaluation.
        """
        raise UserError(f"the checkpoint holds {cls.HOLDS}; it cannot be evaluated")

    @classmethod
    def predictor(
        cls,
        model: nn.Module,
        metadata: ModelMetadata,
        *,
        device: torch.device,
        precision: str,
        topk: int | None,
        batch_size: int,
        num_workers: int,
    ) -> Predictor:
        """Return what predicts for files with a checkpoint's model.

        Args:
            topk: most answers per file where there are many; None: as the task has it.

        Raises:
            UserError: the task predicts nothing for files.
        """
        raise UserError(f"the checkpoint holds {cls.HOLDS}; it predicts nothing for files")


@dataclass(frozen=True)
class ModelSection(Section):
    """The model and the weights that it starts from."""

    SHORT: ClassVar[str] = "model"

    name: str = "vittt_nano_patch4_32"
    """Name of the model in timm's registry (`vision-ttt models` lists ours)."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments of the model, e.g. --arguments.depth 2. They are merged with the
    recipe's, key by key; null removes a key of the recipe and restores the model's default."""
    drop_path: float | None = number(None, SHARE)
    """Stochastic depth: the probability that the last block is skipped (0 to <1), growing linearly
    from 0 at the first; null: the model's default."""
    initial_weights: str | None = None
    """Path of a .safetensors file to start from, or the name of packaged weights, MODEL.TAG, or of
    timm's weights, which are downloaded from the Hugging Face hub. The head is copied only if its
    shape fits; a classifier's starts at zero otherwise. Some tasks also accept a folder. null:
    random initialisation."""
    frozen_layers: int | Literal["all", "inherited"] = number(0, NOT_NEGATIVE)
    """Number of frozen layers, counted from the input (first the patch embedding, then the blocks);
    the head is always trained. all: only the head is trained. inherited: only the head and the
    inner models of a linearised ViT (linear_vit) are."""


@dataclass(frozen=True)
class OptimisationSection(Section):
    """Optimisation by AdamW, its schedule, and the length of the run."""

    epochs: int | None = number(None, COUNT)
    """Length of the run in passes over the training data. Only one of epochs, updates and units may
    be set; the default is 300 epochs."""
    updates: int | None = number(None, COUNT)
    """Length of the run in optimiser updates, instead of epochs."""
    units: int | None = number(None, COUNT)
    """Length of the run in units of the task's loss, e.g. tokens, instead of epochs;
    rounded up to whole updates."""
    batch_size: int = number(1024, COUNT)
    """Items per optimiser update, over all processes and accumulation steps together."""
    accumulation_steps: int = number(1, COUNT)
    """Parts that a batch is cut into to save memory; their gradients are summed."""
    learning_rate: float = number(1e-3, POSITIVE)
    """Largest learning rate, reached after warm-up. Not scaled by the batch size."""
    schedule: Literal["cosine", "polynomial", "steps"] = "cosine"
    """Schedule of the learning rate after the warm-up: half a cosine, a power of the remaining
    share of the run, or steps."""
    minimum_learning_rate: float = number(1e-6, NOT_NEGATIVE)
    """Final learning rate of the cosine and the polynomial."""
    power: float = number(1.0, POSITIVE)
    """Exponent of the polynomial; 1: a straight line."""
    decay_at: list[float] = field(default_factory=list, metadata={"accepted": POSITIVE})
    """Positions of the steps, ascending, in the unit of the run's length. They are scaled like the
    warm-up."""
    decay_rate: float = number(0.1, FRACTION)
    """Factor on the learning rate at each step (>0 to 1)."""
    warmup_learning_rate: float = number(1e-6, NOT_NEGATIVE)
    """Initial learning rate of the linear warm-up."""
    warmup: float = number(0.0, NOT_NEGATIVE)
    """Length of the warm-up, a part of the run's length and in its unit (epochs, updates or units).
    If the length is shorter than the recipe's or in another unit, the warm-up is scaled in
    proportion unless it is given, too."""
    inner_warmup: float = number(0.0, NOT_NEGATIVE)
    """Length of the linear warm-up of the inner learning rates of TTT-MLP layers, in the unit of
    the run's length; the TTT paper uses a tenth of the run. 0: no warm-up."""
    weight_decay: float = number(0.05, NOT_NEGATIVE)
    """Decoupled weight decay; not applied to biases, norms and the model's no_weight_decay."""
    beta1: float = number(0.9, SHARE)
    """Decay of Adam's running mean of gradients (0 to <1)."""
    beta2: float = number(0.999, SHARE)
    """Decay of Adam's running mean of squared gradients (0 to <1)."""
    layer_decay: float | None = number(None, FRACTION)
    """Factor on the learning rate per layer from the head down to the input (>0 to 1); null: 1."""
    new_parameters_rate: float = number(1.0, POSITIVE)
    """Factor on the learning rate of new parameters, for which there are no initial weights: the
    inner models of a linearised ViT (linear_vit). For other models it must be 1."""
    clip_norm: float = number(5.0, NOT_NEGATIVE)
    """Largest L2 norm of the gradient, above which it is scaled down; 0: no clipping."""
    ema_decay: float = number(0.0, SHARE)
    """Decay of the weights' exponential moving average, per update, warmed up from 0 (0 to <1); the
    average is evaluated and saved. 0: no average."""
    non_finite: Literal["stop", "skip"] = "stop"
    """If the loss or a gradient is NaN or infinite: stop the run, or skip the update, which does
    not change weights, moments, average and batch norms' statistics; ten in a row, or as many as an
    epoch has, stop the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = [name for name in LENGTHS if getattr(self, name) is not None]
        if not asked:
            object.__setattr__(self, "epochs", 300)
        if len(asked) > 1:
            listed = ", ".join(f"{name} {getattr(self, name)}" for name in asked)
            raise ConfigError(f"{listed}: only one of {', '.join(LENGTHS)} must be set")
        unit, length = self.length
        for name in ("warmup", "inner_warmup"):
            if (value := getattr(self, name)) > length:
                raise ConfigError(f"{name} is {value}; it must be at most {unit} ({length})")
        if bool(self.decay_at) != (self.schedule == "steps"):
            needed = "at least one point" if self.schedule == "steps" else "empty"
            raise ConfigError(
                f"decay_at is {self.decay_at}; it must be {needed}, as schedule is"
                f" {self.schedule!r}"
            )
        if sorted(set(self.decay_at)) != self.decay_at or max(self.decay_at, default=0) > length:
            raise ConfigError(
                f"decay_at is {self.decay_at}; it must ascend and be at most {unit} ({length})"
            )
        for name, user in (("power", "polynomial"), ("decay_rate", "steps")):
            if self.schedule != user:
                why = f"schedule is {self.schedule!r}, which does not use it"
                refuse_unused(self, [name], why)
        if self.schedule != "steps" and self.minimum_learning_rate > self.learning_rate:
            raise ConfigError(
                f"minimum_learning_rate is {self.minimum_learning_rate}; it must be at most"
                f" learning_rate ({self.learning_rate})"
            )
        if self.batch_size % self.accumulation_steps:
            raise ConfigError(
                f"batch_size is {self.batch_size}; it must be a multiple of accumulation_steps"
                f" ({self.accumulation_steps})"
            )

    @property
    def length(self) -> tuple[str, int]:
        """The unit of the run's length ("epochs", "updates" or "units"), and the length."""
        return next((n, getattr(self, n)) for n in LENGTHS if getattr(self, n) is not None)

    @property
    def micro_batch_size(self) -> int:
        """Items per forward pass, over all processes."""
        return self.batch_size // self.accumulation_steps


LENGTHS = ("epochs", "updates", "units")
"""The fields of :class:`OptimisationSection` of which one says how long a run is."""


@dataclass(frozen=True)
class MachineSection(Section):
    """How the machine computes."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward pass; bfloat16 uses autocast with float32 weights."""
    compile: bool = False
    """Compile the model with torch.compile."""
    composite_ops: bool = True
    """Run blocks by composite ops (vision_ttt.for_training), which reduces time and memory. Results
    are equal to rounding. Checkpoints do not record composite ops."""
    keep_freed_memory: bool = True
    """On a CPU under Linux, keep the memory that a step frees for the next step instead of
    returning it to the system. Steps are faster; the process stays as large as its largest step."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    sharding: Literal["replicated", "sharded"] = "replicated"
    """Distribution of the model over several processes (torchrun): replicated (DDP), or a part of
    every weight, gradient and moment per process (FSDP): less memory, more communication."""
    num_workers: int = number(0, Range(0, MOST_WORKERS, f"from 0 to {MOST_WORKERS}"))
    """Processes that read and prepare batches, per training process (up to 256), and as many again
    for evaluation; they live as long as the run, those of a stream as long as a pass over it.
    0: the training process prepares the batches."""
    loader_timeout: float = number(300.0, Range(0.0, 1e6, "from 0 to 1,000,000"))
    """Seconds to wait for a worker's batch before stopping; 0: for ever."""


@dataclass(frozen=True)
class RunSection(Section):
    """The run's seed, what it writes, and where."""

    seed: int = number(0, Range(0, 2**32 - 1, "from 0 to 2^32 - 1"))
    """Seed of everything random: weights, order, augmentation, drop path (>= 0)."""
    output: str = "runs/train"
    """Run directory, for config, metrics, logs and checkpoints."""
    skip_bad: bool = False
    """Skip, name and count damaged items of the data; otherwise stop."""
    evaluate_every: int | None = number(None, COUNT)
    """Number of updates between evaluations; null: one after each epoch. The end of the run is
    always evaluated."""
    checkpoint_every: int | None = number(None, COUNT)
    """Number of updates between checkpoints, in addition to those after each evaluation; null: only
    those."""
    keep_checkpoints: int = number(2, COUNT)
    """Number of newest checkpoints to keep for resuming. A single one has no fallback."""
    wandb_project: str | None = None
    """Project at Weights & Biases to log to as well (needs the package wandb); null: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "output", os.path.expanduser(self.output))


@dataclass(frozen=True)
class TrainConfig:
    """A training run, whole.

    :func:`vision_ttt.recipes.resolve` makes one of names and values.

    Raises:
        ConfigError: sections that do not go together, or one of another task.
    """

    task: TaskSection
    """What is trained for."""
    data: Section
    """Where the data come from and what is done to them; the task's."""
    model: ModelSection = ModelSection()
    """The model and the weights that it starts from."""
    optimisation: OptimisationSection = OptimisationSection()
    """Length, batches, learning rates."""
    machine: MachineSection = MachineSection()
    """How the machine computes."""
    run: RunSection = RunSection()
    """Seed and output."""

    def __post_init__(self) -> None:
        for name, section in section_types(type(self.task)).items():
            given = getattr(self, name)
            if not isinstance(given, section):
                raise TypeError(f"{name} is a {type(given).__name__}; {section.__name__} is needed")
        self.task.check(self)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return every value by section and field, as recipes and checkpoints hold them."""
        return dataclasses.asdict(self)


def section_types(task: type[TaskSection]) -> dict[str, type[Section]]:
    """Return the sections of a run of a task, by name, in their order."""
    return {
        "task": task,
        "data": task.DATA,
        "model": ModelSection,
        "optimisation": OptimisationSection,
        "machine": MachineSection,
        "run": RunSection,
    }
