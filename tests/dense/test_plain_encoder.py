"""timm's VisionTransformer under the contract of plain backbones, and that contract itself."""

import functools

import pytest
import timm
import torch
from timm.models import VisionTransformer

from tolerances import assert_close
from vision_ttt import linearize
from vision_ttt.dense import TokenMap, ViTAdapter
from vision_ttt.dense.plain_encoder import as_encoder, headless
from vision_ttt.models import create_model

SMALL = {"img_size": 32, "embed_dim": 48, "depth": 4, "num_heads": 3, "dynamic_img_size": True}


def vision_transformer(name="deit_tiny_patch16_224", **arguments):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, "patch_size": 8, **arguments}).eval()


def scans(name, **arguments):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4}
    return create_model(name, dynamic_img_size=True, **sizes, **arguments).eval()


BACKBONES = {
    "deit": lambda: vision_transformer(),
    "distilled": lambda: vision_transformer("deit_tiny_distilled_patch16_224"),
    "registers": lambda: vision_transformer(reg_tokens=3, no_embed_class=True),
    "no class token": lambda: vision_transformer(class_token=False, global_pool="avg"),
    "norm before": lambda: vision_transformer(pre_norm=True),
    "vittt": lambda: create_model("vittt_nano_patch4_32", **SMALL).eval(),
    "middle": lambda: create_model("vittt_nano_patch4_32", **SMALL, global_pool="middle").eval(),
    "vim": lambda: scans("vim_tiny_patch16_224"),
    "mambar": lambda: scans("mambar_small_patch16_224", num_registers=5),
    "mambar, no registers": lambda: scans("mambar_tiny_patch16_224", distribution="none"),
    "vit3": lambda: create_model("vit3_tiny_patch16_224", **SMALL).eval(),
    "linear ViT": lambda: linearize(vision_transformer(global_pool="avg")).eval(),
}


@pytest.mark.parametrize("kind", BACKBONES)
def test_tokens_are_those_of_the_models_own_forward(kind):
    model = BACKBONES[kind]()
    images = torch.randn(2, 3, 48, 32)
    encoder = as_encoder(model)
    with torch.no_grad():
        wanted = model.forward_intermediates(images, intermediates_only=True, output_fmt="NLC")
        x, context = encoder.embed(images)
        for start, stop in ((0, 1), (1, 4)):
            x = encoder.run_blocks(x, context, start, stop)
            image, others = encoder.split_tokens(x)
            assert torch.equal(encoder.join_tokens(image, others), x)
            assert_close(image, wanted[stop - 1], 1e-6)


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("maps", [TokenMap, functools.partial(ViTAdapter, conv_width=8)])
def test_maps_have_no_parameter_without_a_gradient(kind, maps):
    model = maps(BACKBONES[kind]()).train()
    names = {name.partition(".")[0] for name in model.backbone.state_dict()}
    assert not {"neck", "head", "head_dist", "fc_norm"} & names
    maps = model(torch.randn(1, 3, 40, 33))
    sum(x.square().mean() for x in maps).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_checkpointing_of_timms_blocks():
    model = vision_transformer(drop_path_rate=0.0)
    encoder, images = as_encoder(model), torch.randn(1, 3, 32, 32)

    def gradient():
        x, context = encoder.embed(images)
        loss = encoder.run_blocks(x, context).square().sum()
        return torch.autograd.grad(loss, model.patch_embed.proj.weight)[0]

    wanted, runs = gradient(), []
    model.blocks[1].register_forward_pre_hook(lambda *_: runs.append(1))
    model.set_grad_checkpointing()
    assert_close(gradient(), wanted, 1e-5)
    assert len(runs) == 2  # once more in the backward pass


def test_a_name_is_built_for_any_size():
    model = headless("deit_tiny_patch16_224")
    assert isinstance(model, VisionTransformer)
    assert model.dynamic_img_size
    with pytest.raises(TypeError, match=r"must be plain.*got ResNet"):
        headless(timm.create_model("resnet18"))
    with pytest.raises(TypeError, match=r"must be plain.*got resnet18"):
        TokenMap("resnet18")
    with pytest.raises(TypeError, match=r"must be plain.*got int"):
        headless(3)
    with pytest.raises(ValueError, match="one size"):
        headless(vision_transformer(dynamic_img_size=False))
    with pytest.raises(ValueError, match="this Vim's patches overlap; make it without stride"):
        headless(scans("vim_tiny_patch16_224", stride=4))
    with pytest.raises(ValueError, match=r"this VisionTransformer's patch_drop_rate is 0\.5; it"):
        TokenMap(vision_transformer(patch_drop_rate=0.5))
    with pytest.raises(ValueError, match=r"this Vim's patch_drop_rate is 0\.5; it must be 0"):
        headless(scans("vim_tiny_patch16_224", patch_drop_rate=0.5))
