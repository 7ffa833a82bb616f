"""Attention rollout: how a vision transformer passes information on by attention alone."""

from __future__ import annotations

import torch
from timm.layers import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vision_ttt.explain.feature_maps import check_images
from vision_ttt.models.evaluation_mode import evaluation_mode

_ROWS = 512
"""Queries whose attention is held at a time: 6,400 tokens would have 41 million pairs a head."""


def attention_rollout(model: VisionTransformer, images: Tensor) -> Tensor:
    """The share of each image token in the feature, by attention alone (Abnar & Zuidema, 2020)::

        Ã_l = ½ (mean of A_l over heads + I)          I for the residual connection
        map = p Ã_L … Ã_1

    A_l is the softmax of layer l's queries and keys. p takes the rows of the tokens that the
    model's feature is made of: the class token's, for distilled models half of it and half the
    distillation token's, and for mean pooling the mean of those of the tokens pooled. The values,
    the projections and the MLPs do not count, nor does the class.

    The product is taken from the last layer, row by row: memory and time for N tokens are those of
    attention itself, without matrices of N × N products.

    Args:
        model: timm's VisionTransformer with plain attention, e.g. DeiT. It is not modified.
        images: [B, C, H, W], normalised as for the model.

    Returns:
        Maps [B, h, w], float32, ≥ 0; each sums to 1 less the share of class tokens and registers.

    Raises:
        TypeError: the model is no VisionTransformer, or its blocks have other attention.
        ValueError: the model pools otherwise, or the images do not fit it.
    """
    _check(model)
    check_images(images)
    with torch.no_grad(), evaluation_mode(model):
        problems = _queries_and_keys(model, images)
        count = problems[0][0].shape[-2]
        shares = _pooled_rows(model, count, images.device).expand(len(images), -1)  # [B, N]
        for queries, keys in reversed(problems):
            shares = (shares + _through(shares, queries, keys)) / 2
    grid = model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
    return shares[:, model.num_prefix_tokens :].unflatten(1, tuple(grid)).contiguous()


def _check(model: nn.Module) -> None:
    if not isinstance(model, VisionTransformer):
        raise TypeError(
            f"attention rollout needs timm's VisionTransformer, got {type(model).__name__}"
        )
    for index, block in enumerate(model.blocks):
        attention = getattr(block, "attn", None)
        if type(attention) is not Attention:
            raise TypeError(
                "attention rollout needs timm's Attention in every block, block "
                f"{index} ({type(block).__name__}) has {type(attention).__name__}"
            )
    if model.global_pool not in ("token", "avg"):
        raise ValueError(
            f"attention rollout is defined for global_pool 'token' and 'avg', the model has "
            f"{model.global_pool!r}"
        )


def _queries_and_keys(model: VisionTransformer, images: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Queries, scaled, and keys [B, H, N, d] of every block, in order."""
    problems = []

    def record(attention: Attention, inputs: tuple) -> None:
        qkv = attention.qkv(inputs[0]).unflatten(-1, (3, attention.num_heads, attention.head_dim))
        q, k, _ = qkv.permute(2, 0, 3, 1, 4)
        q, k = attention.q_norm(q), attention.k_norm(k)
        problems.append((q.float() * attention.scale, k.float()))

    handles = [block.attn.register_forward_pre_hook(record) for block in model.blocks]
    try:
        model.forward_features(images)
    except AssertionError as error:  # timm's models check sizes by assertions
        raise ValueError(f"the images do not fit the model: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return problems


def _pooled_rows(model: VisionTransformer, count: int, device: torch.device) -> Tensor:
    """The weights [N] of the tokens in the feature."""
    rows = torch.zeros(count, dtype=torch.float32, device=device)
    if model.global_pool == "avg":
        rows[0 if model.pool_include_prefix else model.num_prefix_tokens :] = 1
    elif isinstance(model, VisionTransformerDistilled):  # the mean of two heads' logits
        rows[:2] = 1
    else:
        rows[0] = 1
    return rows / rows.sum()


def _through(shares: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """shares [B, N] · mean over heads of softmax(q kᵀ) [B, N, N] → [B, N]."""
    heads = queries.shape[1]
    passed = torch.zeros_like(shares)
    for rows, own in zip(queries.split(_ROWS, -2), shares.split(_ROWS, -1), strict=True):
        attention = (rows @ keys.mT).softmax(-1)  # [B, H, rows, N]
        passed = passed + (own[:, None, None] @ attention).squeeze(-2).sum(1) / heads
    return passed
