"""for_inference of an adapter: its backbone's blocks packed, its stem's norms folded, same maps."""

import pickle

import pytest
import torch

from tolerances import FORWARD, assert_close
from vision_ttt import for_inference
from vision_ttt.acceleration.packed_linear import FoldedConvNorm, PackedLinear
from vision_ttt.acceleration.packed_vit3 import PackedVit3Block
from vision_ttt.acceleration.packed_vittt import PackedVitttBlock
from vision_ttt.dense import ViTAdapter
from vision_ttt.models import create_model

SMALL = {"img_size": 64, "embed_dim": 48, "depth": 4, "num_heads": 3, "patch_size": 8}
BACKBONES = {
    "vittt": ("vittt_nano_patch4_32", {}),
    "class tokens": ("vittt_nano_patch4_32", {"global_pool": "double"}),
    "vit3": ("vit3_tiny_patch16_224", {}),
    "deit": ("deit_tiny_patch16_224", {}),
}


def adapter(kind):
    name, arguments = BACKBONES[kind]
    torch.manual_seed(0)
    backbone = create_model(name, dynamic_img_size=True, **SMALL, **arguments)
    model = ViTAdapter(backbone, conv_width=8).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(std=0.3)
                module.running_var.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BACKBONES)
def test_the_maps_are_the_models(kind, dtype):
    model, images = adapter(kind), torch.randn(2, 3, 50, 70)
    fast = for_inference(model, dtype=dtype, strict=True)
    with torch.no_grad():
        wanted = model(images)
    maps = fast(images)
    for got, exact in zip(maps, wanted, strict=True):
        assert got.dtype == torch.float32
        assert_close(got, exact, FORWARD[torch.float32] if dtype == torch.float32 else 5e-2)


def test_what_is_packed():
    for kind, block in (("vittt", PackedVitttBlock), ("vit3", PackedVit3Block)):
        fast = for_inference(adapter(kind))
        assert all(type(each) is block for each in fast.backbone.blocks)
    assert fast.channels == (48,) * 4
    assert fast.strides == (4, 8, 16, 32)
    assert all(type(part) is FoldedConvNorm for part in (*fast.prior.stem[:3], *fast.prior.stages))
    linear = [each for each in fast.modules() if isinstance(each, torch.nn.Linear)]
    assert not linear
    assert isinstance(fast.interactions[0].injector.attention.sampling, PackedLinear)


def test_a_pickled_copy():
    fast, images = for_inference(adapter("vittt")), torch.randn(1, 3, 32, 64)
    for got, wanted in zip(pickle.loads(pickle.dumps(fast))(images), fast(images), strict=True):
        assert torch.equal(got, wanted)


def test_a_stem_without_statistics_is_left_alone():
    model = adapter("vittt")
    model.prior.stem[1].norm = torch.nn.BatchNorm2d(8, track_running_stats=False)
    model.prior.stem[2].norm = torch.nn.GroupNorm(2, 8)
    model.prior.stages[0].conv.register_forward_hook(lambda _m, _i, out: out + 1)
    images = torch.randn(1, 3, 64, 64)
    fast = for_inference(model.eval())
    for part in (fast.prior.stem[1], fast.prior.stem[2], fast.prior.stages[0]):
        assert not isinstance(part, FoldedConvNorm)
    with torch.no_grad():
        for got, wanted in zip(fast(images), model(images), strict=True):
            assert_close(got, wanted, FORWARD[torch.float32])
