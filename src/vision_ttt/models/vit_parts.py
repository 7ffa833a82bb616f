"""timm's plain ViTs: which of them are understood, their attention, and their weights' names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from timm.layers import Attention, AttentionRope, LayerScale, PatchEmbed
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3
from timm.models.eva import Eva, EvaAttention, EvaBlock
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vision_ttt.layers import TTTAttention

POOLS = ("avg", "token", "")
"""Ways to pool the tokens that have a counterpart."""
_PROJECTIONS = ("qkv", "q_proj", "k_proj", "v_proj", "proj")
"""Names in timm's attentions, each of which has some of them."""
_ROTARY = (RotaryEmbeddingCat, RotaryEmbeddingDinoV3)


def check_vit(model: nn.Module) -> None:
    """Raise an error with the reason unless a model is a ViT whose attention can be replaced.

    Raises:
        TypeError: it is no module.
        ValueError: it is of another architecture.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be one of timm's ViTs, got {type(model).__name__}")
    if reason := _refusal(model):
        raise ValueError(
            f"{type(model).__name__} cannot be linearised: {reason}. Plain ViTs of timm are"
            " accepted, such as most of vit_*, deit_*, deit3_*, eva*, DINOv2 and DINOv3"
        )


def _refusal(model: nn.Module) -> str | None:
    if type(model) not in (VisionTransformer, Eva):
        return "it is neither timm's VisionTransformer nor its Eva"
    if type(model.patch_embed) is not PatchEmbed:
        return f"its patches are made by {type(model.patch_embed).__name__}, not PatchEmbed"
    if not isinstance(model.patch_embed.norm, nn.Identity):
        return "its patch embedding has a norm"
    if not isinstance(model.patch_drop, nn.Identity | None):
        return "it drops patches (patch_drop_rate)"
    if model.attn_pool is not None or model.global_pool not in POOLS:
        return f"it pools by {model.global_pool!r}; accepted: {', '.join(map(repr, POOLS))}"
    if getattr(model, "pool_include_prefix", False):
        return "it pools class tokens and registers with the image tokens"
    rope = getattr(model, "rope", None)
    if rope is not None and type(rope) not in _ROTARY:
        return f"its positions are {type(rope).__name__}s, which differ between blocks or axes"
    for index, block in enumerate(model.blocks):
        if type(block) not in (Block, EvaBlock):
            return f"blocks.{index} is a {type(block).__name__}"
        attention = block.attn
        if type(attention) not in (Attention, EvaAttention, AttentionRope):
            return f"blocks.{index}.attn is a {type(attention).__name__}"
        if attention.gate is not None:
            return f"blocks.{index}.attn has a gate"
        if getattr(attention, "num_kv_heads", attention.num_heads) != attention.num_heads:
            return f"blocks.{index}.attn shares keys and values between heads"
        for name in _PROJECTIONS:
            projection = getattr(attention, name, None)
            if type(projection) not in (nn.Linear, type(None)):
                return (
                    f"blocks.{index}.attn.{name} is a {type(projection).__name__}, and a Linear is"
                    " required; adapters must be merged first"
                )
    return None


def ttt_attention(attention: nn.Module, inner: str) -> TTTAttention:
    """A layer for the place of timm's attention, with its norms; its projections are new.

    Raises:
        ValueError: the inner model is unknown.
    """
    weight = attention.proj.weight
    layer = TTTAttention(
        attention.proj.out_features,
        attention.num_heads,
        inner,
        head_dim=attention.head_dim,
        qkv_bias="qkv.bias" in inherited_attention(attention.state_dict()),
        proj_bias=attention.proj.bias is not None,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        norm=attention.norm,
        rotate_half=getattr(attention, "rotate_half", False),
    )
    return layer.to(weight.device, weight.dtype)


def layer_scale(block: nn.Module, index: int) -> nn.Module:
    """The scale of a block's first or second branch, as a layer."""
    if isinstance(block, Block):
        return getattr(block, f"ls{index}")
    gamma = getattr(block, f"gamma_{index}")
    if gamma is None:
        return nn.Identity()
    scale = LayerScale(len(gamma)).to(gamma.device, gamma.dtype)
    scale.gamma.data.copy_(gamma.data)
    return scale


def norm_argument(model: nn.Module) -> dict[str, bool]:
    """The constructor argument that fixes the place of a ViT's final norm, independent of the pool.

    A linear model may pool in another way; its norm must stay in the same place.
    """
    name = "use_fc_norm" if isinstance(model, Eva) else "fc_norm"
    return {name: not isinstance(model.fc_norm, nn.Identity)}


def rotary_embedding(rope: nn.Module | None) -> nn.Module | None:
    """A ViT's rotary embedding for grids of any size: timm's may hold the table of one."""
    if not isinstance(rope, RotaryEmbeddingCat):
        return rope
    names = inspect.signature(type(rope)).parameters
    given = {name: getattr(rope, name) for name in names if hasattr(rope, name)}
    return type(rope)(**{**given, "feat_shape": None}).to(next(rope.buffers()).device)


def inherited_attention(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An attention's weights with queries, keys and values as one projection ``qkv``."""
    taken = dict(weights)
    if "q_proj.weight" in taken:
        weight, (q, k, v) = (
            [taken.pop(f"{p}_proj.{kind}", None) for p in "qkv"] for kind in ("weight", "bias")
        )
        taken["qkv.weight"] = torch.cat(weight)
    else:
        q, k, v = taken.pop("q_bias", None), None, taken.pop("v_bias", None)
    if q is not None:
        taken["qkv.bias"] = torch.cat((q, torch.zeros_like(q) if k is None else k, v))
    return taken


def inherited_weights(
    weights: Mapping[str, Tensor], *, keeps_class_token: bool, embeds_prefix: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Name the weights of one of timm's ViTs as its linear counterpart's.

    The class token and the registers become one tensor, their positions added.

    Args:
        weights: of the ViT.
        keeps_class_token: whether the counterpart has the class token; it has the registers.
        embeds_prefix: whether ``pos_embed`` begins with positions of class token and registers.

    Returns:
        The weights under their new names, and the old names of those that have no place.
    """
    taken, left = dict(weights), []
    for old in [key for key in taken if ".gamma_" in key]:
        taken[old.replace("gamma_", "ls") + ".gamma"] = taken.pop(old)
    for block in dict.fromkeys(key.rpartition(".attn.")[0] for key in taken if ".attn." in key):
        start = f"{block}.attn."
        own = [key for key in taken if key.startswith(start)]
        attention = inherited_attention({key[len(start) :]: taken.pop(key) for key in own})
        taken |= {start + key: value for key, value in attention.items()}
    class_token, registers = (taken.pop(key, None) for key in ("cls_token", "reg_token"))
    extra = [each for each in (class_token, registers) if each is not None]
    if not extra:
        return taken, left
    tokens = torch.cat(extra, dim=1)
    positions = taken.get("pos_embed")
    if positions is not None and embeds_prefix:
        own, taken["pos_embed"] = positions.tensor_split([tokens.shape[1]], dim=1)
        tokens = tokens + own
    if class_token is not None and not keeps_class_token:
        tokens, left = tokens[:, 1:], ["cls_token"]
    if tokens.shape[1]:
        taken["class_tokens.tokens"] = tokens
    return taken, left
