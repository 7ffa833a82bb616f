"""Grad-CAM by the package grad-cam, on tokens and on maps."""

import pytest
import timm
import torch
from packaging.requirements import Requirement

from explained_models import small_vit
from studies.deletion.grad_cam import grad_cam
from tolerances import assert_close
from vision_ttt import extras, for_inference
from vision_ttt.extras import MissingPackageError
from vision_ttt.models import HViT3

CLASSES = torch.tensor([1, 2])


@pytest.fixture
def package():
    """Its import takes seconds: tests that need it are slow."""
    return pytest.importorskip("pytorch_grad_cam", reason="needs the extra [explain]")


@pytest.fixture
def images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def scaled(maps):
    """Without what is negative, from 0 to 1."""
    maps = maps.detach().clamp_min(0)
    maps = maps - maps.amin((1, 2), keepdim=True)
    return maps / maps.amax((1, 2), keepdim=True)


def by_hand(features, logits, image_part, classes=CLASSES):
    """``features`` is what the logits are computed from; ``image_part`` makes maps of it."""
    chosen = logits.gather(1, classes[:, None]).sum()
    (gradient,) = torch.autograd.grad(chosen, features)
    weights = image_part(gradient).mean((2, 3), keepdim=True)
    return scaled((weights * image_part(features)).sum(1))


@pytest.mark.slow
def test_grad_cam_of_timms_transformer(package, images):
    model = small_vit().eval()
    x = model.blocks[0](model._pos_embed(model.patch_embed(images)))
    logits = model.forward_head(model.norm(model.blocks[1](x)))
    wanted = by_hand(x, logits, lambda x: x[:, 1:].mT.unflatten(2, (4, 4)))
    assert_close(grad_cam(model, images, CLASSES), wanted, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["avg", "middle"])
def test_grad_cam_of_a_plain_backbone(package, images, pool):
    torch.manual_seed(0)
    options = {"img_size": 16, "embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 3}
    model = timm.create_model("vittt_nano_patch4_32", global_pool=pool, **options).eval()
    x, context = model.embed(images)
    x = model.run_blocks(x, context, 0, 1)
    logits = model.forward_head(model.norm(model.run_blocks(x, context, 1)))
    wanted = by_hand(x, logits, lambda x: model.split_tokens(x)[0].mT.unflatten(2, (4, 4)))
    assert_close(grad_cam(model, images, CLASSES), wanted, 1e-4)
    model.set_grad_checkpointing()
    assert_close(grad_cam(model, images, CLASSES), wanted, 1e-4)


@pytest.mark.slow
def test_grad_cam_of_maps(package, images):
    torch.manual_seed(0)
    model = HViT3(16, 3, dims=(16, 16), depths=(1, 1), num_heads=(1, 1)).eval()
    (x,) = model.forward_intermediates(images, [1], intermediates_only=True)
    logits = model.forward_head(model.norm(x).permute(0, 2, 3, 1))
    classes = logits.argmax(1)  # the mean over the map, the logit itself, is then above 0
    maps = grad_cam(model, images, classes)
    assert maps.shape == (2, 2, 2)
    assert_close(maps, by_hand(x, logits, lambda x: x, classes), 1e-4)


@pytest.mark.slow
def test_the_model_stays_as_it_was(package, images):
    model = small_vit(drop_path_rate=0.5).train().requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        maps = grad_cam(model, images, CLASSES)
    assert (maps.shape, maps.dtype) == ((2, 4, 4), torch.float32)
    assert model.training
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert (model.head.weight.grad == 1).all()
    assert not any(x.requires_grad for x in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.slow
def test_grad_cam_refuses(package, images):
    with pytest.raises(ValueError, match="classes must be 2 whole numbers from 0 to 4"):
        grad_cam(small_vit(), images, torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="do not fit the model"):
        grad_cam(small_vit(), images[..., :12, :12], CLASSES)
    with pytest.raises(TypeError, match="two or more; got 1"):
        grad_cam(small_vit(depth=1), images, CLASSES)
    with pytest.raises(TypeError, match="token grid is known of"):
        grad_cam(torch.nn.Linear(1, 1), images, CLASSES)


def test_grad_cam_says_why_there_are_no_gradients(images):
    with pytest.raises(TypeError, match="a model of for_inference cannot be explained"):
        grad_cam(for_inference(small_vit()), images, CLASSES)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"within torch\.inference_mode"):
        grad_cam(small_vit(), images, CLASSES)


def test_grad_cam_says_what_to_install(monkeypatch, images):
    monkeypatch.setattr(extras, "_requirements", lambda extra: [Requirement("grad-cam")])
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"needs grad-cam: pip .*\[explain\]'"):
        grad_cam(small_vit(), images, CLASSES)
