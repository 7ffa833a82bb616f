"""Token norms of every block, and the outliers among them."""

import pytest
import timm
import torch

from explained_models import small_vit
from tolerances import assert_close
from vision_ttt.explain import largest_over_median, outlier_share, stage_norms, token_norms
from vision_ttt.models import HViT3


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def nano(**options):
    torch.manual_seed(0)
    return timm.create_model("vittt_nano_patch4_32", num_classes=10, depth=2, **options)


@pytest.mark.parametrize("pool", ["avg", "middle", "double"])
def test_norms_are_those_of_every_blocks_image_tokens(images, pool):
    model = nano(global_pool=pool)
    norms = token_norms(model, images)
    assert norms.shape == (3, 2, 8, 8)
    with torch.no_grad():
        maps = model.eval().forward_intermediates(images, intermediates_only=True)
    for depth, features in enumerate(maps):  # [B, D, h, w], before the final norm
        assert_close(norms[:, depth], features.norm(dim=1), 1e-6)


def test_the_model_stays_as_it_was(images):
    model = nano(drop_path_rate=0.5).train()
    model.blocks[0].eval()
    model.set_grad_checkpointing()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    norms = token_norms(model, images)
    assert not norms.requires_grad
    assert model.training
    assert not model.blocks[0].training
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert torch.equal(norms, token_norms(model, images))  # nothing is dropped at random


def test_norms_of_other_sizes_and_in_float32():
    model = nano(dynamic_img_size=True).bfloat16()
    norms = token_norms(model, torch.zeros(1, 3, 16, 48, dtype=torch.bfloat16))
    assert (norms.shape, norms.dtype) == ((1, 2, 4, 12), torch.float32)


@pytest.mark.parametrize("registers", [0, 2])
def test_norms_of_timms_transformer(images, registers):
    model = small_vit(reg_tokens=registers).train()
    images = images[..., :16, :16]
    norms = token_norms(model, images)
    assert model.training
    assert norms.shape == (3, 2, 4, 4)
    model.eval()
    with torch.no_grad():
        x = model._pos_embed(model.patch_embed(images))
        for depth, block in enumerate(model.blocks):
            x = block(x)
            wanted = x[:, 1 + registers :].norm(dim=-1).view(3, 4, 4)
            assert_close(norms[:, depth], wanted, 1e-6)


def test_norms_of_stages(images):
    torch.manual_seed(0)
    model = HViT3(32, 3, dims=(16, 32), depths=(1, 1), num_heads=(1, 1)).eval()
    first, second = stage_norms(model, images)
    with torch.no_grad():
        maps = model.forward_intermediates(images, intermediates_only=True)
    assert_close(first, maps[0].norm(dim=1)[:, None], 1e-6)
    assert_close(second, maps[1].norm(dim=1)[:, None], 1e-6)
    assert (first.shape, second.shape) == ((3, 1, 8, 8), (3, 1, 4, 4))
    with pytest.raises(ValueError, match=r"HViT3 has .* grids \(8 × 8, 4 × 4\): use stage_norms"):
        token_norms(model, images)
    plain = nano()
    assert torch.equal(stage_norms(plain, images)[0], token_norms(plain, images))


def test_token_norms_refuse(images):
    with pytest.raises(TypeError, match=r"forward_intermediates .* got Linear"):
        token_norms(torch.nn.Linear(1, 1), images)
    with pytest.raises(ValueError, match="images must be"):
        token_norms(nano(), images[:, :1])


def test_outliers_are_above_a_multiple_of_their_own_images_median():
    norms = torch.ones(2, 1, 4, 4)
    norms[0, 0, 0, :2] = torch.tensor([2.9, 3.1])
    norms[1] *= 100  # another image's scale makes no outlier
    norms[1, 0, 3] = 500
    assert_close(outlier_share(norms), torch.tensor([[1 / 16], [4 / 16]]), 1e-6)
    assert_close(outlier_share(norms, 2.5), torch.tensor([[2 / 16], [4 / 16]]), 1e-6)
    assert_close(largest_over_median(norms), torch.tensor([[3.1], [5.0]]), 1e-6)
    with pytest.raises(ValueError, match="multiple must be above 0, got 0"):
        outlier_share(norms, 0)
