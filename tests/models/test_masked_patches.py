"""Mask tokens, tokens left out, and what libraries for timm's ViT ask a plain backbone for."""

import pytest
import timm
import torch

from vision_ttt import for_inference
from vision_ttt.models.masked_patches import drop_tokens

PLAIN = {
    "vittt_nano_patch4_32": {"depth": 2, "embed_dim": 32, "num_heads": 1},
    "vit3_nano_patch4_32": {"depth": 2, "embed_dim": 32, "num_heads": 1},
    "vim_nano_patch4_32": {"depth": 2, "embed_dim": 32},
    "mambar_nano_patch4_32": {"depth": 2, "embed_dim": 32},
    "vrwkv_nano_patch4_32": {"depth": 2, "embed_dim": 32},
    "linear_vit": {"img_size": 32, "patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 1},
}
of_every_family = pytest.mark.parametrize("name", PLAIN)


def build(name, **options):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=3, **PLAIN[name], **options).eval()


def images(seed=0):
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@of_every_family
def test_what_is_masked_is_not_seen(name):
    model = build(name)
    model.add_mask_token()
    mask = torch.zeros(2, 64, dtype=torch.bool)
    mask[0, [3, 40]] = mask[1, 17] = True
    pixels = mask.view(2, 1, 8, 8).repeat_interleave(4, 2).repeat_interleave(4, 3)
    others = torch.where(pixels, images(1), images())
    with torch.no_grad():
        seen, plain = model.forward_features(images(), mask), model.forward_features(images())
        assert seen.shape == plain.shape
        assert torch.equal(model.forward_features(others, mask), seen)
        assert torch.equal(model.forward_features(images(), torch.zeros_like(mask)), plain)
        assert not torch.equal(seen, plain)


def test_the_mask_token_gets_the_position_of_the_token_it_replaces():
    model = build("vittt_nano_patch4_32")
    model.add_mask_token()
    x, _ = model.embed(images(), torch.ones(2, 64, dtype=torch.bool))
    assert torch.equal(x, (model.mask_token + model.pos_embed).expand(2, -1, -1))
    x.sum().backward()
    assert (model.mask_token.grad == 2 * 64).all()
    assert "mask_token" in model.no_weight_decay()


def test_masks_that_do_not_fit():
    model = build("vim_nano_patch4_32")
    fitting = torch.zeros(2, 64, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"no mask token; call add_mask_token\(\)"):
        model.forward_features(images(), fitting)
    model.add_mask_token()
    for mask, got in (
        (torch.zeros(2, 65, dtype=torch.bool), r"bool \[2, 65\]"),  # one for the class token, too
        (fitting[:1], r"bool \[1, 64\]"),
        (fitting.float(), r"float32 \[2, 64\]"),
    ):
        with pytest.raises(TypeError, match="a tensor of bool, got ndarray"):
            model.forward_features(images(), mask.numpy())
        with pytest.raises(ValueError, match=rf"must be bool \[2, 64\].*got {got}"):
            model.forward_features(images(), mask)


@pytest.mark.parametrize(
    ("grid", "rate", "left"),
    [
        ((8, 8), 0.5, (6, 5)),
        ((4, 9), 0.75, (2, 4)),
        ((1, 3), 0.99, (1, 1)),
        ((16, 1), 0.75, (4, 1)),
    ],
)
def test_whole_rows_and_columns_are_left_out(grid, rate, left):
    torch.manual_seed(0)
    height, width = grid
    places = torch.arange(height * width).view(1, -1, 1).expand(9, -1, 1)
    kept, smaller = drop_tokens(places, grid, rate, whole_lines=True)
    assert smaller == left
    kept = kept.view(9, *left)
    assert (kept // width == kept[:, :, :1] // width).all()  # a row is of one row
    assert (kept % width == kept[:, :1] % width).all()
    assert (kept.flatten(1).diff() > 0).all()
    if left != (1, 1):
        assert len(kept.unique(dim=0)) > 1  # each image's own


def test_single_tokens_are_left_out():
    torch.manual_seed(0)
    kept, grid = drop_tokens(
        torch.arange(64).view(1, -1, 1).expand(9, -1, 1), (8, 8), 0.7, whole_lines=False
    )
    assert kept.shape == (9, 19, 1)
    assert grid == (1, 19)
    assert (kept.diff(dim=1) > 0).all()
    assert len(kept.unique(dim=0)) == 9


@of_every_family
def test_patch_drop_rate(name):
    if name == "linear_vit":
        with pytest.raises(ValueError, match="drops patches"):
            build(name, patch_drop_rate=0.5)
        return
    model = build(name, patch_drop_rate=0.5)
    whole = build(name).forward_features(images())
    assert torch.equal(model.forward_features(images()), whole)  # in evaluation mode
    others = whole.shape[1] - 64
    features = model.train().forward_features(images())
    assert features.shape[1] == others + (30 if model.keeps_grid else 32)
    model.forward_head(features).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(ValueError, match="patch_drop_rate is 1; accepted: 0 to below 1"):
        build(name, patch_drop_rate=1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vittt_nano_patch4_32", {}),
        ("vittt_nano_patch4_32", {"global_pool": "head"}),
        ("vim_nano_patch4_32", {"global_pool": "head"}),
        ("mambar_nano_patch4_32", {"distribution": "front"}),
        ("vrwkv_nano_patch4_32", {}),
    ],
)
def test_it_runs_as_libraries_run_timms_vit(name, options, dynamic):
    """Patches, prefix, positions, blocks, put together as lightly does it."""
    model = build(name, dynamic_img_size=dynamic, **options)
    tokens = model.patch_embed(images())
    tokens = tokens.flatten(1, 2) if model.dynamic_img_size else tokens
    assert model.no_embed_class
    tokens = tokens + model.pos_embed
    if model.has_class_token:
        prefix = model.cls_token.expand(2, -1, -1)
        assert prefix.shape[1] == model.num_prefix_tokens
        tokens = torch.cat((prefix, tokens), dim=1)
    got = model.norm(model.blocks(model.norm_pre(model.pos_drop(tokens))))
    torch.testing.assert_close(got, model.forward_features(images()), rtol=0, atol=1e-6)
    if model.keeps_grid:
        with pytest.raises(ValueError, match="do not fill a grid of 8 × 8"):
            model.blocks(tokens[:, :16])


def test_class_tokens_among_the_image_tokens_are_no_prefix():
    model = build("vim_nano_patch4_32")
    assert model.has_class_token
    assert model.num_prefix_tokens == 0
    assert model.cls_token is None
    with pytest.raises(ValueError, match=r"context that the model's embed\(\) returns"):
        model.blocks(torch.zeros(1, 64, 32))


def test_blocks_called_alone_follow_the_input_size():
    model = build("vittt_nano_patch4_32", mlp_ratio=3.0)
    model.set_input_size((16, 32))
    assert model.blocks(torch.zeros(1, 32, 32)).shape == (1, 32, 32)
    assert for_inference(model.eval()).blocks(torch.zeros(1, 32, 32)).shape == (1, 32, 32)
    model.prune_intermediate_layers(1)
    assert model.blocks(torch.zeros(1, 32, 32)).shape == (1, 32, 32)
