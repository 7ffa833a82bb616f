"""Images at their own proportions, as sequences of patches: timm's NaFlex data."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from timm.data import create_transform
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify
from torch import Tensor

from vision_ttt.data.loading import Batch, Transform, without_damaged


class Sequences(NamedTuple):
    """How images become sequences of patches."""

    tokens: int
    """Most patches of an image, which is resized to at most as many, mostly to nearly as many."""
    patch: tuple[int, int]
    """Height and width of a patch in pixels."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Of timm's `create_transform`."""
        own = {"patch_size": self.patch, "max_seq_len": self.tokens}
        return {"naflex": True, "patchify": True, **own}

    def evaluation_transform(
        self, data_config: Mapping[str, Any], *, patchify: bool = True
    ) -> Transform:
        """Return timm's evaluation transform: all of the image, resized and cut into patches.

        Without `patchify` the transform returns the resized image [3, H, W] instead of its patches.
        """
        own = {key: data_config[key] for key in ("input_size", "interpolation", "mean", "std")}
        return create_transform(**own, **{**self.arguments, "patchify": patchify})


def collate_sequences(items: Sequence[Any], patch: tuple[int, int]) -> Batch:
    """Pad the good images to the longest and list the bad ones; see `loading.collate`.

    `images` is a batch of timm's: patches [B, N, P · P · 3], patch_coord and patch_valid. Without a
    good image it has a black patch, which the targets do not count.
    """
    good, damaged = without_damaged(items)
    return {
        "images": stack_sequences([image for image, _, _ in good] or [_black(patch)]),
        "targets": torch.tensor([target for _, target, _ in good], dtype=torch.int64),
        "indices": torch.tensor([index for _, _, index in good], dtype=torch.int64),
        "damaged": damaged,
    }


def stack_sequences(images: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return images, at least one, as one batch that is padded to the longest."""
    longest = max(len(image["patches"]) for image in images)
    batch, _ = NaFlexCollator(longest)([(image, 0) for image in images])
    del batch["seq_len"]
    return batch


def _black(patch: tuple[int, int]) -> dict[str, Tensor]:
    return Patchify(patch)(torch.zeros(3, *patch))
