"""One run on several processes: how a model is shared, and what the processes have to agree on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, gather_object
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from vision_ttt import environment
from vision_ttt.engine.config import ConfigError, TrainConfig
from vision_ttt.engine.sharded_tensors import whole

_Value = TypeVar("_Value")

if TYPE_CHECKING:
    from vision_ttt.engine.task import Task


def make_accelerator(accumulation_steps: int = 1) -> Accelerator:
    """Return this process's accelerator; under torchrun it is one of several.

    Without a GPU the processes talk through gloo, which has to be asked for. The precision and the
    accumulation steps are the run's own, whatever accelerate's config file and environment
    variables say.
    """
    several = environment.whole_number("WORLD_SIZE", 1) > 1
    return Accelerator(
        mixed_precision="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(accumulation_steps),
        cpu=several and not torch.accelerator.is_available(),
    )


def check_processes(config: TrainConfig, accelerator: Accelerator) -> None:
    """Check that the run can be divided among its processes.

    Raises:
        ConfigError: a batch or the model cannot be divided so.
    """
    processes = accelerator.num_processes
    size = config.optimisation.micro_batch_size
    share, rest = divmod(size, processes)
    if rest:
        raise ConfigError(
            f"batch_size / accumulation_steps is {size}; it must be a multiple of the"
            f" {processes} processes"
        )
    config.task.check_share(share)
    if config.machine.sharding == "sharded" and processes == 1:
        raise ConfigError(
            "sharding is 'sharded', but there is one process; start several with"
            " torchrun --nproc_per_node=N -m vision_ttt train …"
        )


def share_model(model: nn.Module, accelerator: Accelerator, sharding: str) -> nn.Module:
    """Return what to call in training: the model itself, replicated by DDP, or sharded by FSDP.

    Sharded, `model` is changed in place: each process holds its part of every weight, and gathers
    those of one block (a child of `model.blocks`) at a time. On GPUs, a model that has a method
    `synchronise_batch_norms` normalises over the batches of all processes (PyTorch has that for no
    CPU).
    """
    several = accelerator.num_processes > 1 and accelerator.device.type != "cpu"
    if several and hasattr(model, "synchronise_batch_norms"):
        model.synchronise_batch_norms()
    if sharding == "sharded":
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return accelerator.prepare_model(model)


def share_buffers(model: nn.Module, accelerator: Accelerator) -> None:
    """Give every process the main one's buffers, which checkpoints hold.

    The running statistics of batch norms follow what each process has seen; evaluated with its own,
    a model would be another on each.
    """
    if accelerator.num_processes > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)


def unshared(model: nn.Module, task: Task, name: str, model_args: Mapping[str, Any]) -> nn.Module:
    """Return a model that one process can run alone: `model` itself unless it is sharded."""
    if not isinstance(model, FSDPModule):
        return model
    weights = {key: whole(value) for key, value in model.state_dict().items()}
    alone = task.build_model(name, model_args)
    alone.load_state_dict(weights)
    return alone.to(next(iter(weights.values())).device)


def summed(figures: list[float], accelerator: Accelerator) -> list[float]:
    """Return the figures, each summed over all processes."""
    if accelerator.num_processes == 1:
        return figures
    precise = torch.tensor(figures, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(precise, reduction="sum").tolist()


def together(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all processes' rows, on every process; they need not have equally many."""
    several = gather_object([{name: value.cpu() for name, value in rows.items()}])
    return {name: torch.cat([each[name] for each in several]) for name in rows}


def all_names(names: list[str]) -> list[str]:
    """Return every process's names once, in the order of the processes."""
    return list(dict.fromkeys(gather_object(list(names))))


def first_given(value: _Value | None) -> _Value | None:
    """Return the value of the first process that gives one; None if all of them give None."""
    return next((each for each in gather_object([value]) if each is not None), None)


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise an OSError of one process on all: none goes on, and waits for one that has ended.

    Processes may exchange values within this context only if an error cannot come between.

    Raises:
        OSError: this process's, or that of the first process that has one.
    """
    failure = None
    try:
        yield
    except OSError as error:
        failure = error
    first = first_given(failure)
    if first is not None:
        raise failure or first
