"""Attention rollout against products of whole attention matrices."""

import pytest
import torch
from timm.models.deit import VisionTransformerDistilled

from explained_models import small_vit
from studies.deletion import rollout
from studies.deletion.rollout import attention_rollout
from tolerances import assert_close


@pytest.fixture
def images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def whole_product(model, images):
    """Ã_2 Ã_1 [B, N, N] of attention as the layers without fused kernels compute it."""
    matrices = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda *call: matrices.append(call[-1]))
    with torch.no_grad():
        model.eval()(images)
    first, second = ((a.mean(1) + torch.eye(a.shape[-1])) / 2 for a in matrices)
    return second @ first


@pytest.mark.parametrize("rows", [512, 7])
@pytest.mark.parametrize(
    ("options", "pooled", "prefix"),
    [
        ({}, slice(0, 1), 1),
        ({"reg_tokens": 2, "qk_norm": True}, slice(0, 1), 3),
        ({"kind": VisionTransformerDistilled}, slice(0, 2), 2),
        ({"global_pool": "avg", "class_token": False}, slice(0, None), 0),
        ({"global_pool": "avg"}, slice(1, None), 1),
    ],
)
def test_rollout_is_the_product_of_the_layers(monkeypatch, images, options, pooled, prefix, rows):
    monkeypatch.setattr(rollout, "_ROWS", rows)
    model = small_vit(**options)
    maps = attention_rollout(model, images)
    product = whole_product(model, images)
    wanted = product[:, pooled].mean(1)[:, prefix:].unflatten(1, (4, 4))
    assert_close(maps, wanted, 1e-5)
    assert wanted.std() > 0.1 * wanted.mean()  # even attention would show nothing


def test_the_model_stays_as_it_was(images):
    model = small_vit(attn_drop_rate=0.5, drop_path_rate=0.5).train()
    fused = [block.attn.fused_attn for block in model.blocks]
    maps = attention_rollout(model, images)
    assert not maps.requires_grad
    assert model.training
    assert [block.attn.fused_attn for block in model.blocks] == fused
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert torch.equal(maps, attention_rollout(model, images))  # nothing is dropped at random
    with pytest.raises(ValueError, match="do not fit the model"):
        attention_rollout(model, torch.zeros(1, 3, 20, 20))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_rollout_in_bfloat16(images):
    model = small_vit()
    wanted = attention_rollout(model, images)
    maps = attention_rollout(model.bfloat16(), images.bfloat16())
    assert maps.dtype == torch.float32
    assert_close(maps, wanted, 1.5e-2)


def test_rollout_on_other_sizes():
    model = small_vit(dynamic_img_size=True)
    assert attention_rollout(model, torch.zeros(1, 3, 8, 24)).shape == (1, 2, 6)


def test_rollout_refuses(images):
    with pytest.raises(TypeError, match="VisionTransformer, got Linear"):
        attention_rollout(torch.nn.Linear(1, 1), images)
    with pytest.raises(TypeError, match=r"block 0 \(Block\) has DiffAttention"):
        attention_rollout(small_vit(attn_layer="diff"), images)
    with pytest.raises(ValueError, match="has 'map'"):
        attention_rollout(small_vit(global_pool="map", class_token=False), images)
    with pytest.raises(ValueError, match="images must be"):
        attention_rollout(small_vit(), images[0])
