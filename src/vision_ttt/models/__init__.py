"""Model families, one file each. Importing this package registers the classifiers with timm.

A family's file has the entrypoints of its models, under their names.
"""

from vision_ttt.models import vittt_ablations
from vision_ttt.models.dit3 import DiT3
from vision_ttt.models.h_vit3 import HViT3
from vision_ttt.models.linear_vit import LinearViT
from vision_ttt.models.linearize import Inheritance, linearize
from vision_ttt.models.mamba_reg import MambaReg
from vision_ttt.models.registry import create_model, is_model, list_models
from vision_ttt.models.vim import Vim
from vision_ttt.models.vit3 import ViT3
from vision_ttt.models.vittt import Vittt
from vision_ttt.models.vrwkv import VRWKV

__all__ = [
    "DiT3",
    "HViT3",
    "Inheritance",
    "LinearViT",
    "MambaReg",
    "VRWKV",
    "ViT3",
    "Vim",
    "Vittt",
    "create_model",
    "is_model",
    "linearize",
    "list_models",
    "vittt_ablations",
]
