"""Weights of another kind of numbers are refused wherever weights are loaded."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vision_ttt.convert import ConversionError, remap
from vision_ttt.dense.backbone_weights import load_backbone
from vision_ttt.engine.building import build_model, load_weights
from vision_ttt.engine.config import ConfigError
from vision_ttt.models.fitted_weights import checkpoint_filter_fn
from vision_ttt.models.number_kinds import of_another_kind

NANO = {"num_classes": 2, "embed_dim": 32, "depth": 1, "num_heads": 1, "img_size": 16}
OTHERS = [torch.int64, torch.uint8, torch.bool, torch.complex64]


def _model() -> nn.Module:
    return build_model("vittt_nano_patch4_32", NANO)


def _with(weights: dict[str, Tensor], name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {**weights, name: weights[name].to(dtype)}


def test_the_precision_may_differ_and_the_kind_not() -> None:
    own = {"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.int64)}
    half = {"a": own["a"].half(), "b": own["b"].to(torch.int32), "c": own["a"]}
    assert of_another_kind(half, own) == []
    swapped = {"a": own["b"], "b": own["a"]}
    assert of_another_kind(swapped, own) == [
        "a torch.int64 for torch.float32",
        "b torch.float32 for torch.int64",
    ]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_no_model_takes_them(dtype: torch.dtype) -> None:
    model = _model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ConfigError, match=rf"w has tensors .* norm\.weight {dtype} for"):
        load_weights(model, _with(before, "norm.weight", dtype), Path("w"))
    backbone = {name: x for name, x in before.items() if "head" not in name}
    with pytest.raises(ValueError, match=rf"w has tensors .* pos_embed {dtype} for"):
        load_backbone(model, _with(backbone, "pos_embed", dtype), "w")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_position_embedding_of_another_size_keeps_its_kind() -> None:
    weights = {"pos_embed": torch.zeros(1, 9, 32, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"pos_embed torch\.int64 for torch\.float32"):
        checkpoint_filter_fn(weights, _model())


def test_no_release_is_converted_with_them() -> None:
    model = build_model("vit3_tiny_patch16_224", {"num_classes": 2, "depth": 1})
    released = {name.replace(".ttt.", ".attn."): x for name, x in model.state_dict().items()}
    assert remap(released, model)
    with pytest.raises(ConversionError, match=r"kind of numbers .* head\.bias torch\.int64 for"):
        remap(_with(released, "head.bias", torch.int64), model)
