"""Tensors that several processes share: `torch.distributed.tensor.DTensor`.

A DTensor is recognised by its method `full_tensor`: importing its class takes half a second, which
a process that runs alone need not spend.
"""

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether each of several processes holds a part of `tensor`."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor's whole value; every process has to call it if the tensor is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole value into a tensor; if it is sharded, the part that this process holds."""
    if is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        # Every process has the value: each cuts its own part, and none is sent.
        mesh, placements = tensor.device_mesh, tensor.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
        tensor = tensor.to_local()
    tensor.copy_(value)
