"""Layers and whole blocks on packed weights, for :func:`vision_ttt.for_inference`."""

from vision_ttt.ops.packed.linear import packed_linear
from vision_ttt.ops.packed.mamba_band import packed_mamba_band
from vision_ttt.ops.packed.mamba_block import packed_mamba_block
from vision_ttt.ops.packed.patches import packed_patches
from vision_ttt.ops.packed.swiglu_ttt_block import packed_swiglu_ttt_block
from vision_ttt.ops.packed.vit3_band import packed_vit3_band
from vision_ttt.ops.packed.vit3_block import packed_vit3_block
from vision_ttt.ops.packed.vittt_band import packed_vittt_band
from vision_ttt.ops.packed.vittt_blocks import packed_vittt_blocks
from vision_ttt.ops.packed.weights import pack, unpack

__all__ = [
    "pack",
    "packed_linear",
    "packed_mamba_band",
    "packed_mamba_block",
    "packed_patches",
    "packed_swiglu_ttt_block",
    "packed_vit3_band",
    "packed_vit3_block",
    "packed_vittt_band",
    "packed_vittt_blocks",
    "unpack",
]
