"""Inference on packed weights: a linear layer, and whole blocks; see :func:`vision_ttt.for_inference`."""

from vision_ttt.ops.packed.linear import packed_linear
from vision_ttt.ops.packed.vittt_block import VitttBlockParameters, packed_vittt_block
from vision_ttt.ops.packed.weights import pack, unpack

__all__ = ["VitttBlockParameters", "pack", "packed_linear", "packed_vittt_block", "unpack"]
