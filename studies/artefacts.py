"""What the tokens of large norm know: a classifier's accuracy from a share of its image tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vision_ttt.models.evaluation_mode import evaluation_mode
from vision_ttt.models.plain_backbone import PlainBackbone

SHARES = {
    "all tokens": (0.0, 1.0),
    "top 20 %": (0.0, 0.2),
    "top 10 %": (0.0, 0.1),
    "top 5 %": (0.0, 0.05),
    "lowest 80 %": (0.2, 1.0),
}
"""Rows of Mamba-Reg's Table 1 → from which to which share of the tokens, by descending norm."""

OWN = "the model's own feature"


@torch.no_grad()
def share_accuracies(
    model: PlainBackbone, batches: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Accuracy of the model's own feature, and of the mean of the tokens of each share.

    Norms are those of the last block's image tokens; the mean is over the same tokens after the
    final norm, and the model's own head classifies it, which has learned another feature. Of a
    share at least one token is taken.

    Args:
        model: whose head takes a feature of D channels. It is not modified.
        batches: images [B, C, H, W] and classes [B], on the model's device.

    Raises:
        TypeError: the model is not a plain backbone of this package.
        ValueError: its head takes another feature, or there is no image.
    """
    if not isinstance(model, PlainBackbone):
        raise TypeError(f"a plain backbone of vision_ttt is needed, got {type(model).__name__}")
    if model.head_hidden_size != model.embed_dim:
        raise ValueError(
            f"the head takes {model.head_hidden_size} channels, and a token has {model.embed_dim};"
            " registers that are concatenated cannot be replaced by tokens"
        )
    right: dict[str, int] = dict.fromkeys((OWN, *SHARES), 0)
    count = 0
    with evaluation_mode(model):
        for images, classes in batches:
            x, context = model.embed(images)
            x = model.run_blocks(x, context)
            order = model.split_tokens(x)[0].float().norm(dim=-1).argsort(1, descending=True)
            x = model.norm(x)
            tokens, _ = model.split_tokens(x)
            tokens = tokens.take_along_dim(order[..., None], 1)
            features = {OWN: model.pool(x)}
            for name, (start, stop) in SHARES.items():
                first, last = (round(share * tokens.shape[1]) for share in (start, stop))
                features[name] = tokens[:, first : max(last, first + 1)].mean(1)
            for name, feature in features.items():
                right[name] += int((model.head(feature).argmax(1) == classes).sum())
            count += len(images)
    if not count:
        raise ValueError("there is no image")
    return {name: each / count for name, each in right.items()}
