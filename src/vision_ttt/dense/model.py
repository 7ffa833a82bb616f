"""What every dense model is to an optimiser and to a run: a backbone inside, and the rest."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from vision_ttt.errors import UserError
from vision_ttt.models.weight_decay import undecayed_parameters

_BACKBONE = "maps.backbone."


class DenseModelError(UserError, ValueError):
    """A dense model cannot be built or divided into layers as it was asked for."""


class DenseModel(nn.Module):
    """A model on the maps of a map module, with timm's contract on layers and weight decay.

    The layers are the backbone's. All other parameters (adapter, norms of the outputs, pyramid,
    heads) form the last group of the layer decay and are what :meth:`get_classifier` holds.

    Args:
        maps: a map module: images [B, C, H, W] → maps [B, C_i, H / s_i, W / s_i], sides
            rounded up, with the attributes ``channels``, ``strides`` and ``backbone``, and the
            method ``set_grad_checkpointing``.

    Attributes:
        in_chans: C, which the backbone names; 3 where it does not.
    """

    class_layers: tuple[str, ...] = ()
    """Names of the layers whose size follows from the number of classes."""

    def __init__(self, maps: nn.Module) -> None:
        super().__init__()
        self.maps = maps
        self.in_chans: int = getattr(maps.backbone, "in_chans", 3)

    @property
    def blocks(self) -> list[nn.Module]:
        """The backbone's blocks, the units in which FSDP gathers weights; empty where unknown."""
        return list(getattr(self.maps.backbone, "blocks", ()))

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that the backbone and other parts exempt from weight decay."""
        return undecayed_parameters(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer decay: the backbone's. What no pattern matches is the last group.

        Raises:
            DenseModelError: the backbone does not name its layers.
        """
        if not hasattr(self.maps.backbone, "group_matcher"):
            raise DenseModelError(
                f"{type(self.maps.backbone).__name__} does not name its layers (group_matcher)"
            )
        own = self.maps.backbone.group_matcher(coarse=coarse)
        return {group: _prefixed(patterns) for group, patterns in own.items()}

    def get_classifier(self) -> nn.Module:
        """A list of all parameters outside the backbone."""
        return nn.ParameterList(
            parameter
            for name, parameter in self.named_parameters()
            if not name.startswith(_BACKBONE)
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only the inputs of the map module's blocks."""
        self.maps.set_grad_checkpointing(enable)

    def synchronise_batch_norms(self) -> None:
        """Let the batch norms outside the backbone normalise over the batches of all processes.

        Published dense models train with two images per GPU, too few to normalise over: of a map
        pooled to 1 × 1, two values would become −1 and 1. Changes no parameter and no name.
        """
        for part, kept in ((self, self.maps), (self.maps, self.maps.backbone)):
            for name, child in part.named_children():
                if child is not kept:
                    setattr(part, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))


def _prefixed(patterns: Any) -> Any:
    """Patterns of a matcher for the names that the backbone's parameters have in the model."""
    if isinstance(patterns, str):
        # timm matches from a name's beginning; an anchor could not follow the prefix.
        unanchored = re.sub(r"(?<![\[\\])\^", "", patterns)
        return f"^{re.escape(_BACKBONE)}(?:{unanchored})"
    if patterns is None:
        return None
    return [(_prefixed(pattern), suffix) for pattern, suffix in patterns]
