"""Small models, and their tokens by way of bands, for the tests of whole pictures."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from vision_ttt.models.linear_vit import LinearViT
from vision_ttt.whole import WholePictures, plan

LINEAR: dict[str, Any] = {
    **{"model_name": "linear_vit", "img_size": 32, "patch_size": 4, "embed_dim": 48},
    **{"num_heads": 3},
}
MODELS: dict[str, dict[str, Any]] = {
    "vittt": {"model_name": "vittt_nano_patch4_32"},
    "vittt-mlp": {"model_name": "vittt_nano_patch4_32", "inner_model": "mlp"},
    "vittt-double": {"model_name": "vittt_nano_patch4_32", "global_pool": "double"},
    "vittt-middle": {"model_name": "vittt_nano_patch4_32", "global_pool": "middle"},
    "vittt-max": {
        **{"model_name": "vittt_nano_patch4_32", "global_pool": "max_norm"},
        **{"img_size": (32, 36), "patch_size": (4, 6)},
    },
    "vittt-conv1d": {"model_name": "vittt_nano_patch4_32", "design": "conv1d"},
    "vittt-first-row": {"model_name": "vittt_nano_patch4_32", "design": "ttt_layer"},
    "vittt-one-way": {"model_name": "vittt_nano_patch4_32", "design": "one_way"},
    "vit3": {"model_name": "vit3_nano_patch4_32"},
    "vim": {"model_name": "vim_nano_patch4_32"},
    "mambar": {"model_name": "mambar_nano_patch4_32"},
    "vrwkv": {"model_name": "vrwkv_nano_patch4_32"},
    "vrwkv-post": {
        **{"model_name": "vrwkv_nano_patch4_32", "post_norm": True, "init_scale": 0.5},
        **{"global_pool": "max_norm"},
    },
    "linear-vit": {**LINEAR, "base": "deit_tiny_patch16_224"},
    "linear-vit3": {
        **{**LINEAR, "base": "vit_tiny_patch16_224", "inner": "vit3", "class_token": "keep"},
        **{"pre_norm": True, "qk_norm": True, "init_values": 0.5, "reg_tokens": 2},
    },
    "linear-registers": {
        **{**LINEAR, "base": "vit_tiny_patch16_224", "reg_tokens": 3, "global_pool": "avg"},
    },
}


def make(name: str, **arguments: Any) -> nn.Module:
    """A small model whose parameters, those at 0 and 1 too, have been shaken."""
    torch.manual_seed(0)
    given = {"depth": 3, "num_classes": 5, "dynamic_img_size": True, "dynamic_img_pad": True}
    model = timm.create_model(**{**given, **MODELS[name], **arguments}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        if isinstance(model, LinearViT):  # what its inner models learn would be below rounding
            for name, parameter in model.named_parameters():
                if ".attn." in name:
                    parameter *= 3
    return model


def collected(whole: WholePictures, picture: Tensor, **arguments: Any) -> Tensor:
    """All tokens [h, w, D]."""
    return torch.cat([x for _, x in whole.tokens(picture, **arguments)])


def in_bands(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Let bands have so many tokens at most."""
    monkeypatch.setattr(plan, "BAND_TOKENS", tokens)
