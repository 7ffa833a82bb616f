"""Image sizes of plain backbones: checks, patch embeddings, positions and those of other grids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed, to_2tuple
from torch import Tensor, nn
from torch.fx.node import has_side_effect

from vision_ttt.ops.vit3_ttt.descent import without_autocast

_USUAL_REDUCTION = 32  # pixels per cell of the last feature map, for models that do not tell


def size_multiple(model: nn.Module) -> int:
    """Pixels that an image's sides are to be multiples of: a cell of the model's last map."""
    reductions = [info["reduction"] for info in getattr(model, "feature_info", ())]
    return int(max(reductions, default=_USUAL_REDUCTION))


@has_side_effect  # a graph of torch.fx keeps it, though nothing uses its result
def check_images(x: Tensor, in_chans: int, only: tuple[int, int] | None) -> tuple[int, int]:
    """Check that images x are [B, C, H, W], with pixels, of one size where only that is accepted.

    Returns:
        H and W.

    Raises:
        TypeError: they are not a tensor; only plain backbones support a NaFlex batch, a dict.
        ValueError: the model does not support them; the message names the argument that does.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"images must be a tensor [B, {in_chans}, H, W], got a {type(x).__name__}; a NaFlex"
            " batch, a dict, requires a plain backbone made with dynamic_img_size=True"
        )
    if x.ndim != 4 or x.shape[1] != in_chans or 0 in x.shape[2:]:
        raise ValueError(f"images must be [B, {in_chans}, H, W], got {list(x.shape)}")
    height, width = size = tuple(x.shape[-2:])
    if only is not None and size != only:
        raise ValueError(
            f"images are {height} × {width} pixels, the model was made for {only[0]} × {only[1]}; "
            f"make it with img_size={size}, or with dynamic_img_size=True for changing sizes"
        )
    return size


def check_overlapping(
    size: tuple[int, int], patch: tuple[int, int], stride: tuple[int, int]
) -> None:
    """Check that patches at a stride below their size cover an image; all in pixels.

    Raises:
        ValueError: a patch is larger than the image, or pixels are left over.
    """
    for side, own, step in zip(size, patch, stride, strict=True):
        if side < own or (side - own) % step:
            raise ValueError(
                f"images of {size[0]} × {size[1]} pixels are not whole patches of {patch[0]} × "
                f"{patch[1]} at a stride of {stride[0]} × {stride[1]}"
            )


@has_side_effect  # a graph of torch.fx keeps it, though nothing uses its result
def check_image_size(
    x: Tensor, patch_embed: PatchEmbed, in_chans: int, *, dynamic: bool, pad: bool
) -> None:
    """Check the shape of a plain backbone's images.

    Args:
        x: images [B, C, H, W].
        patch_embed: the model's.
        in_chans: C.
        dynamic: the model accepts any size, not only its own.
        pad: the model pads sizes that are not whole patches.

    Raises:
        ValueError: the shape is not that of images, the size is not the model's own, or not whole
            patches; the message names the argument that supports it.
    """
    size, patch = check_images(x, in_chans, None), patch_embed.patch_size
    if not dynamic and size != tuple(patch_embed.img_size):
        if pad and tuple(patch_embed.dynamic_feat_size(size)) == tuple(patch_embed.grid_size):
            return
        check_images(x, in_chans, tuple(patch_embed.img_size))
    if (stride := patch_embed.proj.stride) != patch:
        check_overlapping(size, patch, stride)
    elif not pad and (size[0] % patch[0] or size[1] % patch[1]):
        raise ValueError(
            f"images of {size[0]} × {size[1]} pixels are not whole patches of {patch[0]} × "
            f"{patch[1]}; make the model with dynamic_img_pad=True to pad them"
        )


class GridPatchEmbed(PatchEmbed):
    """timm's patch embedding, with the grid that images of its own size have.

    timm rounds this grid down, even where the embedding pads images and rounds their grid up.
    """

    def _init_img_size(
        self, img_size: int | tuple[int, int] | None
    ) -> tuple[tuple[int, int] | None, tuple[int, int] | None, int | None]:
        if img_size is None:
            return None, None, None
        sides = to_2tuple(img_size)
        grid = self.dynamic_feat_size(sides)
        return sides, grid, grid[0] * grid[1]


def patch_embedding(
    img_size: int | tuple[int, int], patch_size: int, in_chans: int, embed_dim: int, *, pad: bool
) -> PatchEmbed:
    """A patch embedding that leaves the check of sizes to the model."""
    patch_embed = GridPatchEmbed(
        None,
        patch_size,
        in_chans,
        embed_dim,
        strict_img_size=False,
        dynamic_img_pad=pad,
        output_fmt="NHWC",
        flatten=False,
    )
    patch_embed.set_input_size(img_size)  # timm's constructor does not know yet whether it pads
    return patch_embed


def position_embedding(patch_embed: PatchEmbed) -> nn.Parameter:
    """Learned positions [1, T, D] of a patch embedding's grid, normal with deviation 0.02."""
    positions = torch.empty(1, patch_embed.num_patches, patch_embed.proj.out_channels)
    return nn.Parameter(nn.init.trunc_normal_(positions, std=0.02))


def embed_patches(x: Tensor, patch_embed: PatchEmbed, *, pad: bool) -> Tensor:
    """Tokens [B, h, w, D] of images [B, C, H, W], with ``pad`` padded right and bottom.

    ``patch_embed`` is not called: its own checks would fix the size under torch.compile.
    """
    if pad:
        height, width = x.shape[-2:]
        patch_height, patch_width = patch_embed.patch_size
        x = F.pad(x, (0, -width % patch_width, 0, -height % patch_height))
    # Contiguous tokens: a sum keeps the memory layout of its terms, and in the layout of maps every
    # block would copy its tokens.
    return patch_embed.proj(x).permute(0, 2, 3, 1).contiguous()


def positions_for(grid: tuple[int, int], positions: Tensor, own_grid: tuple[int, int]) -> Tensor:
    """Interpolate a position embedding [1, h · w, D] of ``own_grid`` to another grid (h, w).

    The interpolation is timm's: bicubic, antialiased and at least in float32.
    """
    # A program exported for any size keeps the branch taken in tracing, so this one is not taken.
    for_any_size = torch.compiler.is_exporting() and any(isinstance(n, torch.SymInt) for n in grid)
    if not for_any_size and grid == tuple(own_grid):
        return positions
    dtype = torch.promote_types(positions.dtype, torch.float32)
    x = positions.to(dtype).view(*own_grid, -1)  # [h, w, D]
    with without_autocast(x):
        rows, columns = (
            bicubic_matrix(old, new, x) for old, new in zip(own_grid, grid, strict=True)
        )
        x = columns @ (rows @ x.flatten(1)).unflatten(1, x.shape[1:])
    return x.flatten(0, 1).unsqueeze(0).to(positions.dtype)


def bicubic_matrix(old: int, new: int, like: Tensor) -> Tensor:
    """Weights [new, old] that resize an axis as ``F.interpolate`` does, bicubic and antialiased.

    A product with them replaces that function because it has no backward pass at dynamic sizes
    under torch.compile (PyTorch 2.14), and because runtimes of ONNX compute other weights.

    Args:
        old: the length of the axis.
        new: its length after resizing; it may be symbolic.
        like: a tensor with the dtype and device of the weights.
    """
    axes = {"dtype": like.dtype, "device": like.device}
    scale = old / torch.scalar_tensor(new, **axes)
    center = scale * (torch.arange(new, **axes) + 0.5)
    x = (torch.arange(old, **axes) - center.unsqueeze(1) + 0.5) / scale.clamp(min=1)
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1  # the cubic convolution kernel with a = -½
    far = ((2.5 - 0.5 * x) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    return weights / weights.sum(1, keepdim=True)
