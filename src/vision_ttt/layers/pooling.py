"""Classification features from tokens (Vision-TTT, Table 4)."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.layers.extra_tokens import ExtraTokens

POOLS = ("avg", "max_norm", "head", "middle", "double", "")
"""Mean, the token of largest L2 norm, a class token (the mean of both for "double"); "" for all."""


def pool_tokens(x: Tensor, pool: str, class_tokens: ExtraTokens | None) -> Tensor:
    """The feature [B, D] of tokens x [B, N, D], class tokens among them; x itself for pool ""."""
    if pool == "":
        return x
    extra = None
    if class_tokens is not None:
        x, extra = class_tokens.extract(x)
    if pool == "avg":
        return x.mean(1)
    if pool == "max_norm":
        strongest = x.float().norm(dim=-1).argmax(1)  # [B]
        return x.take_along_dim(strongest[:, None, None], dim=1).squeeze(1)
    if extra is None:
        raise ValueError(f"pool {pool!r} needs class tokens, and there are none")
    return extra.mean(1)
