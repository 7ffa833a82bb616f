"""What backbones share of timm's contract: running their blocks, pooling and a linear head."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from vision_ttt.models.torchscript import NotScriptable

POOLS = ("avg", "")


def choose(name: str, value: str, accepted: Collection[str]) -> str:
    """value, if it is accepted.

    Raises:
        ValueError: it is not; names what is.
    """
    if value not in accepted:
        raise ValueError(f"{name} must be one of {list(accepted)}, got {value!r}")
    return value


def feature_cfg(blocks: int, most: int = 3) -> dict[str, Any]:
    """How timm's ``features_only`` takes a model's maps: after the last ``most`` or all blocks."""
    return {"out_indices": min(most, blocks), "feature_cls": "getter"}


class Classifier(NotScriptable, nn.Module):
    """A stack of `blocks`, their final `norm` and a `head`, whose names timm knows.

    A subclass makes them, sets `grad_checkpointing`, and has :meth:`forward_features`,
    :meth:`forward_head` and :meth:`reset_classifier`.
    """

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only each block's input for the backward pass."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what ``forward_intermediates`` with these indices does not need."""
        taken, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0)
        return taken

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def _run(self, block: nn.Module, *inputs: Any) -> Tensor:
        if self.grad_checkpointing and not is_fx_symbolic_tracing():
            return checkpoint(block, *inputs)
        return block(*inputs)

    @staticmethod
    def _make_head(num_features: int, num_classes: int, like: Tensor) -> nn.Module:
        """A fresh head beside a parameter, for no classes the identity."""
        if not num_classes:
            return nn.Identity()
        head = nn.Linear(num_features, num_classes, device=like.device, dtype=like.dtype)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head


class PooledClassifier(Classifier):
    """A backbone's pooling and head; a subclass gives forward_features [B, …, D], channels last.

    Args:
        num_features: D.
        num_classes: logits; 0 for the pooled feature itself.
        global_pool: "avg", or "" for the features as they are.
        drop_rate: dropout before the head.

    Raises:
        ValueError: an unknown global_pool.
    """

    def __init__(
        self, num_features: int, num_classes: int, global_pool: str, drop_rate: float
    ) -> None:
        super().__init__()
        self.num_features = self.head_hidden_size = num_features
        self.grad_checkpointing = False
        self.head_drop = nn.Dropout(drop_rate)
        self.head: nn.Module = nn.Identity()
        self.reset_classifier(num_classes, global_pool)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a fresh one, and the pooling where given."""
        if global_pool is not None:
            self.global_pool = choose("global_pool", global_pool, POOLS)
        self.num_classes = num_classes
        like = next(self.parameters(), torch.empty(0))  # the head comes first in __init__
        self.head = self._make_head(self.num_features, num_classes, like).train(self.training)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of features [B, …, D], or with ``pre_logits`` the feature the head would see."""
        if self.global_pool == "avg":
            x = x.flatten(1, -2).mean(1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)
