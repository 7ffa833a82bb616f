"""Whole pictures in bands: equal to the model on the whole picture, in the memory that is given."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.tolerances import assert_close
from vision_ttt.dense import LinearSegmenter, TokenMap
from vision_ttt.whole import WholePictures, plan

TOLERANCE = 2e-5

MODELS: dict[str, dict[str, Any]] = {
    "vittt": {"model_name": "vittt_nano_patch4_32"},
    "vittt-mlp": {"model_name": "vittt_nano_patch4_32", "inner_model": "mlp"},
    "vittt-double": {"model_name": "vittt_nano_patch4_32", "global_pool": "double"},
    "vittt-middle": {"model_name": "vittt_nano_patch4_32", "global_pool": "middle"},
    "vittt-max": {"model_name": "vittt_nano_patch4_32", "global_pool": "max_norm"},
    "vittt-conv1d": {"model_name": "vittt_nano_patch4_32", "design": "conv1d"},
    "vittt-first-row": {"model_name": "vittt_nano_patch4_32", "design": "ttt_layer"},
    "vittt-one-way": {"model_name": "vittt_nano_patch4_32", "design": "one_way"},
    "vit3": {"model_name": "vit3_nano_patch4_32"},
    "vim": {"model_name": "vim_nano_patch4_32"},
    "mambar": {"model_name": "mambar_nano_patch4_32"},
}


def make(name: str, **arguments: Any) -> nn.Module:
    """A small model whose parameters, those at 0 and 1 too, have been shaken."""
    torch.manual_seed(0)
    given = {"depth": 3, "num_classes": 5, "dynamic_img_size": True, "dynamic_img_pad": True}
    model = timm.create_model(**{**given, **MODELS[name], **arguments}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def collected(whole: WholePictures, picture: Tensor, **arguments: Any) -> Tensor:
    """All tokens [h, w, D]."""
    return torch.cat([x for _, x in whole.tokens(picture, **arguments)])


def in_rows(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Let bands have so many tokens at most."""
    monkeypatch.setattr(plan, "BAND_TOKENS", tokens)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("size", "band"),
    [((43, 58), 40), ((28, 20), 1000), ((32, 32), 8)],
    ids=["bands of odd rows", "one band", "bands of one row"],
)
def test_it_is_the_model_on_the_whole_picture(
    name: str, size: tuple[int, int], band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_rows(monkeypatch, band)
    model, picture = make(name), torch.randn(3, *size)
    whole = WholePictures(model)
    with torch.no_grad():
        features = model.forward_features(picture[None])
        logits = model.forward_head(features)[0]
        image, _ = model.split_tokens(features)
    assert_close(collected(whole, picture).flatten(0, 1), image[0], TOLERANCE, name)
    assert_close(whole.logits(picture), logits, TOLERANCE, name)
