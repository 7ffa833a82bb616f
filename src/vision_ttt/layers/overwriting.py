"""When a layer may reuse the memory of an intermediate result."""

from __future__ import annotations

import torch
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from vision_ttt.ops._backend import is_transformed


def may_overwrite() -> bool:
    """Whether nothing is to be differentiated, transformed, traced or compiled.

    That alone allows nobody to write into what another module returned: it may have kept it. A
    layer overwrites what an op gave it, or an unwatched ``nn.Linear``
    (:func:`vision_ttt.layers.plain_calls.is_plain`), which keep nothing. Compiled code is left
    alone: it plans its memory itself.
    """
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or is_fx_symbolic_tracing()
        or is_transformed()
    )
