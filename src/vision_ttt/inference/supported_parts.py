"""The check that a module computes what its packed form computes, made once per conversion."""

from __future__ import annotations

from torch import Tensor, nn


class UnsupportedPart(Exception):
    """A module has no packed form; the message names the part and the reason."""


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
    if any(
        getattr(module, hooks)
        for hooks in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
        )
    ):
        raise UnsupportedPart(f"{path} has a hook")
    tensors = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
    for name, x in tensors:
        if type(x) not in (Tensor, nn.Parameter):
            raise UnsupportedPart(f"{path}.{name} is a {type(x).__name__}")
