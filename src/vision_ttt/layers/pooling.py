"""Classification features from tokens (Vision-TTT, Table 4)."""

from __future__ import annotations

from torch import Tensor

from vision_ttt.layers.extra_tokens import ExtraTokens


def pool_tokens(x: Tensor, pool: str, class_tokens: ExtraTokens | None) -> Tensor:
    """The feature [B, D] of tokens x [B, N, D], class tokens among them.

    Args:
        x: image tokens and class tokens.
        pool: "avg" (the mean of the image tokens), "max_norm" (the image token of largest L2 norm;
            after a norm layer whose weights are all 1, as in a fresh model, these are equal, and
            rounding chooses), the placement of the class tokens (the mean of these), or "" (x as it
            is).
        class_tokens: what inserted them; None where there are none.

    Raises:
        ValueError: the pool is unknown, or it is of class tokens that there are not.
    """
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
    if extra is None or pool != class_tokens.placement:
        placement = () if class_tokens is None else (class_tokens.placement,)
        raise ValueError(f"pool must be one of {['avg', 'max_norm', *placement, '']}, got {pool!r}")
    return extra.mean(1)
