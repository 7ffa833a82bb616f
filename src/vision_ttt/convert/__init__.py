"""Conversion of the authors' released weights to weights of this library's models.

Example:
    >>> model = timm.create_model("vit3_tiny_patch16_224")
    >>> model.load_state_dict(convert.remap(convert.read_release("vit3_t.pth"), model))
"""

from vision_ttt.convert.family import ConversionError, Family
from vision_ttt.convert.release import read_release
from vision_ttt.convert.remap import FAMILIES, remap

__all__ = ["FAMILIES", "ConversionError", "Family", "read_release", "remap"]
