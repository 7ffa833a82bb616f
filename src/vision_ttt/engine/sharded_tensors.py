"""Tensors that several processes share: `torch.distributed.tensor.DTensor`.

A DTensor is recognised by its method `full_tensor`: importing its class takes half a second, which
a process that runs alone need not spend.
"""

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether each of several processes holds a part of `tensor`."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor's whole value; every process has to call it if the tensor is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state dict with whole tensors; every process has to call it."""
    return {name: whole(value) for name, value in model.state_dict().items()}
