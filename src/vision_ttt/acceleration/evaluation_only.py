"""A wrapper that restricts a model to evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.utils._pytree import tree_leaves, tree_map


class EvaluationOnly(nn.Module):
    """The result of :func:`vision_ttt.for_inference`, which is called like the model that it wraps.

    Other attributes are looked up in that model; its methods ``forward_features`` and the like are
    called as the model is, with the same casts. The wrapper supports copying, pickling,
    ``torch.compile``, ``torch.export`` and calls from several threads at once.

    Args:
        model: in evaluation mode, its parameters frozen.
        cast: the dtype that inputs are cast to, with outputs cast to float32; None for no casts.
    """

    def __init__(self, model: nn.Module, cast: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.cast = cast
        super().train(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result.

        Raises:
            RuntimeError: a parameter or an argument requires a gradient, unless gradients are
                disabled; or an argument has a tangent of forward-mode differentiation.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._refuse_gradients(args, kwargs)
        with torch.no_grad():
            return self._with_casts(self.model, *args, **kwargs)

    def _with_casts(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.cast is None:
            return function(*args, **kwargs)
        return _cast(function(*_cast(args, self.cast), **_cast(kwargs, self.cast)), torch.float32)

    def _refuse_gradients(self, args: Any, kwargs: Any) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                raise RuntimeError(f"{name} requires a gradient: {_WHAT_IT_IS}")
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and (x.requires_grad or unpack_dual(x).tangent is not None):
                raise RuntimeError(f"an argument requires a gradient: {_WHAT_IT_IS}")

    def train(self, mode: bool = True) -> EvaluationOnly:
        """Stay in evaluation mode.

        Raises:
            RuntimeError: ``mode`` is True.
        """
        if mode:
            raise RuntimeError(f"train() is not for this copy: {_WHAT_IT_IS}")
        return super().train(False)

    def requires_grad_(self, requires_grad: bool = True) -> EvaluationOnly:
        """Keep the parameters frozen.

        Raises:
            RuntimeError: ``requires_grad`` is True.
        """
        if requires_grad:
            raise RuntimeError(f"requires_grad_() is not for this copy: {_WHAT_IT_IS}")
        return super().requires_grad_(False)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> NoReturn:
        """Raise an error, because the weights are packed.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"load_state_dict() is not for this copy: {_WHAT_IT_IS}")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error, because no model could load what transformers would save.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"this copy is not saved as a checkpoint: {_WHAT_IT_IS}")

    push_to_hub = save_pretrained

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EvaluationOnly:
        """Refuse to move or cast the model; ``to``, ``float`` and ``cuda`` call this method.

        Raises:
            RuntimeError: the device or a dtype would change.
        """
        for dtype in (torch.float32, torch.bfloat16):
            example = torch.empty(0, dtype=dtype, device="cpu")
            moved = fn(example)
            if (moved.dtype, moved.device) != (example.dtype, example.device):
                raise RuntimeError(f"this copy keeps its device and dtypes: {_WHAT_IT_IS}")
        return super()._apply(fn, recurse)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # "model" does not exist yet during unpickling; a special method of the model, for
            # copying it say, is not one of this module.
            if name == "model" or (name.startswith("__") and name.endswith("__")):
                raise
            found = getattr(super().__getattr__("model"), name)
            is_call = self.cast is not None and name.startswith(_CALLS)
            return partial(self._with_casts, found) if is_call else found


_CALLS = "forward_", "get_intermediate_layers"
"""What the names of methods begin with that take images and return features, as in timm."""

_WHAT_IT_IS = (
    "for_inference packed its weights for evaluation; train, load or change the model it was made "
    "of and call for_inference again"
)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in x, also those in containers, which keep their class.

    Containers are PyTorch's pytrees, which include the outputs of transformers.
    """

    def cast(leaf: Any) -> Any:
        is_floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_floating else leaf

    return tree_map(cast, x)
