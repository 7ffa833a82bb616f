"""A patch embedding whose patches overlap."""

from __future__ import annotations

from timm.layers import to_2tuple
from torch import nn

from vision_ttt.models.image_size import GridPatchEmbed, check_overlapping

Size = int | tuple[int, int]


class OverlappingPatchEmbed(GridPatchEmbed):
    """timm's patch embedding with a patch of side p every ``stride`` < p pixels.

    Images of s pixels have ⌊(s - p) / stride⌋ + 1 patches along that side.

    Args:
        img_size, patch_size, in_chans, embed_dim: as timm's.
        stride: pixels from patch to patch.

    Raises:
        ValueError: patches would not cover an image.
    """

    def __init__(
        self, img_size: Size, patch_size: int, in_chans: int, embed_dim: int, *, stride: int
    ) -> None:
        super().__init__(
            None,
            patch_size,
            in_chans,
            embed_dim,
            strict_img_size=False,
            output_fmt="NHWC",
            flatten=False,
        )
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride)
        self.set_input_size(img_size)

    def set_input_size(self, img_size: Size | None = None, patch_size: Size | None = None) -> None:
        """Change the image size.

        Raises:
            ValueError: the patch size is to change, or patches would not cover an image.
        """
        if patch_size is not None and to_2tuple(patch_size) != self.patch_size:
            raise ValueError(
                f"patch_size is {patch_size}; patches that overlap keep theirs, {self.patch_size}"
            )
        if img_size is not None:
            check_overlapping(to_2tuple(img_size), self.patch_size, self.proj.stride)
        super().set_input_size(img_size)

    def feat_ratio(self, as_scalar: bool = True) -> Size:
        """Pixels from patch to patch."""
        return max(self.proj.stride) if as_scalar else self.proj.stride

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """The grid of an image's patches."""
        rows, columns = (
            (side - own) // step + 1
            for side, own, step in zip(img_size, self.patch_size, self.proj.stride, strict=True)
        )
        return rows, columns
