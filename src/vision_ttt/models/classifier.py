"""What every classifier of images shares of timm's contract: pooling and a linear head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_ttt.models.arguments import check_arguments, choose
from vision_ttt.models.torchscript import NotScriptable


def linear_head(
    num_features: int,
    num_classes: int,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A fresh linear layer [B, num_features] → [B, num_classes], or for no classes the identity.

    Initialisation: weight normal with standard deviation 0.02, bias zero.
    """
    if not num_classes:
        return nn.Identity()
    head = nn.Linear(num_features, num_classes, device=device, dtype=dtype)
    nn.init.trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head


class Classifier(NotScriptable, nn.Module):
    """Images [B, C, H, W] → logits [B, num_classes]: features, their pooling, a linear head.

    A subclass calls :meth:`_add_head` in its constructor and defines :meth:`forward_features`, and
    :meth:`pool` where the mean over all tokens or pixels does not suffice.
    """

    def _add_head(
        self,
        head: nn.Module,
        num_features: int,
        *,
        pools: tuple[str, ...] = ("avg", ""),
        global_pool: str,
        drop_rate: float,
    ) -> None:
        """Register the last parts.

        Args:
            head: of :func:`linear_head`.
            num_features: D, channels of the features.
            pools: the accepted values of ``global_pool``.
            global_pool: one of them; "" returns the features as they are.
            drop_rate: dropout before the head.

        Raises:
            ValueError: global_pool is not among the accepted values.
        """
        self.num_features = self.head_hidden_size = num_features
        self.num_classes = head.out_features if isinstance(head, nn.Linear) else 0
        self.pools = pools
        self.global_pool = choose("global_pool", global_pool, pools)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = head

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a fresh one, and the pooling where ``global_pool`` is given.

        On an error the model stays as it is.

        Raises:
            ValueError: the model does not support this pooling, or num_classes is out of its range.
            TypeError: num_classes is no whole number.
        """
        check_arguments(num_classes=num_classes)
        if global_pool is not None:
            self.global_pool = choose("global_pool", global_pool, self.pools)
        self.num_classes = num_classes
        like = next(self.parameters(), torch.empty(0))
        head = linear_head(self.head_hidden_size, num_classes, device=like.device, dtype=like.dtype)
        self.head = head.train(self.training)

    def forward_features(self, x: Tensor) -> Tensor:
        """Normalised features [B, …, D] of images [B, C, H, W], channels last."""
        raise NotImplementedError

    def pool(self, x: Tensor) -> Tensor:
        """The classification feature [B, D] of features [B, …, D]; for ``global_pool=""`` x."""
        return x.flatten(1, -2).mean(1) if self.global_pool == "avg" else x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of features [B, …, D], or with ``pre_logits`` the input of the head."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))
