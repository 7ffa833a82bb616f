"""One run on several processes: who does what, how a model is shared, what has to be agreed on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from vision_ttt.engine.config import ConfigError, TrainConfig

if TYPE_CHECKING:
    from vision_ttt.engine.task import Task


def make_accelerator(accumulation_steps: int = 1) -> Accelerator:
    """Return this process's accelerator; under torchrun it is one of several.

    Without a GPU the processes talk through gloo, which has to be asked for.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return Accelerator(
        gradient_accumulation_steps=accumulation_steps,
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
    those of one block (a child of `model.blocks`) at a time.
    """
    if sharding == "sharded":
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return accelerator.prepare_model(model)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor's whole value; every process has to call it where weights are sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state dict with whole tensors; every process has to call it."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def unshared(model: nn.Module, task: Task, name: str, model_args: Mapping[str, Any]) -> nn.Module:
    """Return a model that one process can run alone: `model` itself unless it is sharded."""
    if not isinstance(model, FSDPModule):
        return model
    weights = whole_state(model)
    alone = task.build_model(name, model_args)
    alone.load_state_dict(weights)
    return alone.to(next(iter(weights.values())).device)


def place_like(value: Tensor, weight: Tensor) -> Tensor:
    """Shard `value` as `weight` is, where it is sharded and `value` has its shape."""
    if isinstance(weight, DTensor) and value.shape == weight.shape:
        value = value.to(weight.device)
        return distribute_tensor(value, weight.device_mesh, weight.placements)
    return value


def summed(figures: list[float], accelerator: Accelerator) -> list[float]:
    """Return the figures, each summed over all processes."""
    if accelerator.num_processes == 1:
        return figures
    precise = torch.tensor(figures, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(precise, reduction="sum").tolist()


def together(rows: Mapping[str, Tensor], accelerator: Accelerator) -> dict[str, Tensor]:
    """Return all processes' rows, on every process; they need not have equally many."""
    if accelerator.num_processes == 1:
        return dict(rows)
    several = gather_object([{name: value.cpu() for name, value in rows.items()}])
    return {name: torch.cat([each[name] for each in several]) for name in rows}


def all_names(names: list[str], accelerator: Accelerator) -> list[str]:
    """Return every process's names once, in the order of the processes."""
    if accelerator.num_processes == 1:
        return names
    return list(dict.fromkeys(gather_object(list(names))))
