"""The checks that a module computes what its packed or composite form computes."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as modules

from vision_ttt.layers import DirectionalConv1d

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSORS = (Tensor, nn.Parameter)


class UnsupportedPart(Exception):
    """A module has no packed form; the message names the part and the reason."""


class OtherDesign(UnsupportedPart):
    """A block is of a design that has no packed form, though nothing in it was changed."""


def require(module: nn.Module | None, path: str, *kinds: type[nn.Module]) -> None:
    """Require that ``module`` is of exactly one of ``kinds``, unchanged and without hooks.

    Args:
        module: a part of a block.
        path: its name in the block, for messages.
        kinds: the accepted classes; their subclasses are not.

    Raises:
        UnsupportedPart: the module is of another class (a subclass, a wrapper, a parametrised
            module), has a replaced method, a hook, or tensors of a subclass of PyTorch's.
    """
    kind = type(module)
    if kind not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise UnsupportedPart(f"{path} is a {kind.__name__}, not a {names}")
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    names = {name for each in own for name in vars(each) if not name.startswith("__")} | {"forward"}
    replaced = names & set(module.__dict__)
    if replaced:
        raise UnsupportedPart(f"{path} has its own {', '.join(sorted(replaced))}")
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise UnsupportedPart(f"{path} has a hook")
    tensors = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
    for name, x in tensors:
        if type(x) not in _TENSORS:
            raise UnsupportedPart(f"{path}.{name} is a {type(x).__name__}")


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a call of ``module`` runs the forward pass of one of ``kinds`` and nothing else.

    It is :func:`require` for forward passes: a hook, a replaced ``forward``, an adapter or a
    parameter of a tensor subclass makes it False.
    """
    return (
        type(module) in kinds
        and "forward" not in vars(module)
        and not any(getattr(module, hooks) for hooks in _HOOKS)
        and are_plain(*module.parameters(recurse=False))
    )


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether all tensors are of PyTorch's plain classes, unlike those of tensor parallelism."""
    return all(x is None or type(x) in _TENSORS for x in tensors)


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules, e.g. by ``register_module_forward_hook``."""
    return any(getattr(modules, f"_global{hooks}") for hooks in _HOOKS)


def require_linear(module: nn.Module, path: str, *, bias: bool) -> None:
    """Require a plain linear layer with a bias, or without.

    Raises:
        UnsupportedPart: see :func:`require`; or it has a bias, or none.
    """
    require(module, path, nn.Linear)
    if (module.bias is not None) != bias:
        raise UnsupportedPart(f"{path} has {'no' if bias else 'a'} bias")


def require_affine(norm: nn.Module, path: str) -> None:
    """Require a plain LayerNorm with a weight and a bias.

    Raises:
        UnsupportedPart: see :func:`require`; or it lacks one of them.
    """
    require(norm, path, nn.LayerNorm)
    for name in ("weight", "bias"):
        if getattr(norm, name) is None:
            raise UnsupportedPart(f"{path} has no {name}")


def require_scans(conv: nn.Module, path: str, reverse_channels: int) -> None:
    """Require a plain directional convolution in which ``reverse_channels`` scan from T to 1.

    Raises:
        UnsupportedPart: see :func:`require`; or another number of channels does.
    """
    require(conv, path, DirectionalConv1d)
    if conv.reverse_channels != reverse_channels:
        raise UnsupportedPart(
            f"{path} has reverse_channels={conv.reverse_channels}, not {reverse_channels}"
        )
