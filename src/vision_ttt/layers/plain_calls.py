"""Whether modules may be passed over for an op that does the same."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules import module as all_modules


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether calling ``module`` does what a ``kind`` does and nothing else.

    So it is what the library wrote and nobody listens: no subclass, no wrapper, no method replaced
    on this one instance, and no hook on it or on all modules, backward ones among them.
    """
    return are_plain(((module, kind),))


def are_plain(modules: Iterable[tuple[nn.Module | None, type[nn.Module]]]) -> bool:
    """Whether each of (module, kind) :func:`is_plain`."""
    if (
        all_modules._global_forward_hooks
        or all_modules._global_forward_pre_hooks
        or all_modules._global_backward_hooks
        or all_modules._global_backward_pre_hooks
        or is_fx_symbolic_tracing()  # which records the call of every module
    ):
        return False
    for module, kind in modules:
        if not does_as(module, kind) or (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            return False
    return True


def does_as(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether ``module`` is exactly a ``kind``, with none of its methods replaced."""
    if type(module) is not kind:
        return False
    return (_NAMES.get(kind) or _names(kind)).isdisjoint(module.__dict__)


_NAMES: dict[type[nn.Module], frozenset[str]] = {}


def _names(kind: type[nn.Module]) -> frozenset[str]:
    """What ``kind`` adds to ``nn.Module``: an instance finds it on its class unless replaced."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    _NAMES[kind] = frozenset(
        name for each in own for name in vars(each) if not name.startswith("__")
    )
    return _NAMES[kind]
