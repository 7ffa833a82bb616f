"""Model families, one file each. Importing this package registers the classifiers with timm."""

from vision_ttt.models import vittt_ablations
from vision_ttt.models.conv_deit import (
    ConvDeiT,
    conv_deit_nano_patch4_32,
    conv_deit_tiny_patch16_224,
)
from vision_ttt.models.design_space import DesignSpace, design_space_nano_patch4_32
from vision_ttt.models.dit3 import (
    DiT3,
    dit3_base_patch2_32,
    dit3_base_patch4_32,
    dit3_base_patch8_32,
    dit3_nano_patch4_32,
    dit3_small_patch2_32,
    dit3_small_patch4_32,
    dit3_small_patch8_32,
)
from vision_ttt.models.h_vit3 import HViT3, hvit3_base, hvit3_small, hvit3_tiny
from vision_ttt.models.mamba_reg import (
    MambaReg,
    mambar_base_patch16_224,
    mambar_large_patch16_224,
    mambar_nano_patch4_32,
    mambar_small_patch16_224,
    mambar_tiny_patch16_224,
)
from vision_ttt.models.registry import create_model, is_model, list_models
from vision_ttt.models.vim import (
    Vim,
    vim_base_patch16_224,
    vim_nano_patch4_32,
    vim_small_patch16_224,
    vim_tiny_patch16_224,
)
from vision_ttt.models.vit3 import (
    ViT3,
    vit3_base_patch16_224,
    vit3_nano_patch4_32,
    vit3_nano_patch8_256,
    vit3_small_patch16_224,
    vit3_tiny_patch16_224,
)
from vision_ttt.models.vittt import (
    Vittt,
    vittt_base_patch16_224,
    vittt_nano_patch4_32,
    vittt_nano_patch8_256,
    vittt_small_patch16_224,
    vittt_tiny_patch16_224,
)
from vision_ttt.models.vrwkv import (
    VRWKV,
    vrwkv_base_patch16_224,
    vrwkv_nano_patch4_32,
    vrwkv_small_patch16_224,
    vrwkv_tiny_patch16_224,
)

__all__ = [
    "create_model",
    "is_model",
    "list_models",
    "Vittt",
    "vittt_base_patch16_224",
    "vittt_nano_patch4_32",
    "vittt_nano_patch8_256",
    "vittt_small_patch16_224",
    "vittt_tiny_patch16_224",
    "vittt_ablations",
    "DesignSpace",
    "design_space_nano_patch4_32",
    "ViT3",
    "vit3_base_patch16_224",
    "vit3_nano_patch4_32",
    "vit3_nano_patch8_256",
    "vit3_small_patch16_224",
    "vit3_tiny_patch16_224",
    "ConvDeiT",
    "conv_deit_nano_patch4_32",
    "conv_deit_tiny_patch16_224",
    "HViT3",
    "hvit3_base",
    "hvit3_small",
    "hvit3_tiny",
    "Vim",
    "vim_base_patch16_224",
    "vim_nano_patch4_32",
    "vim_small_patch16_224",
    "vim_tiny_patch16_224",
    "VRWKV",
    "vrwkv_base_patch16_224",
    "vrwkv_nano_patch4_32",
    "vrwkv_small_patch16_224",
    "vrwkv_tiny_patch16_224",
    "MambaReg",
    "mambar_base_patch16_224",
    "mambar_large_patch16_224",
    "mambar_nano_patch4_32",
    "mambar_small_patch16_224",
    "mambar_tiny_patch16_224",
    "DiT3",
    "dit3_base_patch2_32",
    "dit3_base_patch4_32",
    "dit3_base_patch8_32",
    "dit3_nano_patch4_32",
    "dit3_small_patch2_32",
    "dit3_small_patch4_32",
    "dit3_small_patch8_32",
]
