"""Whether a module is just what the library wrote: asked once, when a model is converted."""

from __future__ import annotations

from torch import Tensor, nn


class Unknown(Exception):
    """A part that the packed block does not know; says which and why."""


def require(module: nn.Module | None, path: str, *kinds: type[nn.Module]) -> None:
    """Raise unless ``module`` is exactly of one of ``kinds`` and nobody has changed or watches it.

    Raises:
        Unknown: it is of another class (a wrapper's, a parametrised one), has a method of its own,
            a hook, or a tensor of another kind than PyTorch's.
    """
    kind = type(module)
    if kind not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise Unknown(f"{path} is a {kind.__name__}, not a {names}")
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    names = {name for each in own for name in vars(each) if not name.startswith("__")} | {"forward"}
    replaced = names & set(module.__dict__)
    if replaced:
        raise Unknown(f"{path} has its own {', '.join(sorted(replaced))}")
    if any(
        getattr(module, hooks)
        for hooks in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
        )
    ):
        raise Unknown(f"{path} has a hook")
    tensors = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
    for name, x in tensors:
        if type(x) not in (Tensor, nn.Parameter):
            raise Unknown(f"{path}.{name} is a {type(x).__name__}")
