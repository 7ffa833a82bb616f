"""Maps resampled from the tokens of a plain backbone: sizes, values, the papers' counts."""

import pytest
import torch
import torch.nn.functional as F

from tolerances import assert_close
from vision_ttt.bench import count_parameters
from vision_ttt.dense import PyramidMaps, ViTAdapter, build_segmenter
from vision_ttt.models import create_model


def backbone(name="mambar_nano_patch4_32", **options):
    torch.manual_seed(0)
    options = {"patch_size": 8, "embed_dim": 24, "depth": 4, **options}
    return create_model(name, num_classes=0, dynamic_img_size=True, **options)


@pytest.mark.parametrize("patch", [4, 8, 16, 32])
def test_a_map_per_stride_with_sides_rounded_up(patch):
    maps = PyramidMaps(backbone(patch_size=patch)).eval()
    with torch.no_grad():
        found = maps(torch.randn(2, 3, 70, 33))
    for x, stride in zip(found, maps.strides, strict=True):
        assert tuple(x.shape) == (2, 24, -(-70 // stride), -(-33 // stride))


def test_the_maps_are_the_tokens_of_four_depths():
    maps = PyramidMaps(backbone(depth=5), blocks=[0, 1, 3, 4]).eval()
    x = torch.randn(2, 3, 64, 32)
    up = maps.resample[0]
    kept = maps.backbone.forward_intermediates(x, intermediates_only=True)
    wanted = [up(kept[0]), kept[1], F.max_pool2d(kept[3], 2), F.max_pool2d(kept[4], 4)]
    for a, b in zip(maps(x), wanted, strict=True):
        assert_close(a, b, 1e-6)
    bare = PyramidMaps(backbone(), transposed=False).eval()
    assert not list(bare.resample.parameters())
    with pytest.raises(ValueError, match="squares of 4, 8, 16 or 32"):
        PyramidMaps(backbone(patch_size=12, img_size=48))


def test_every_parameter_learns():
    maps = PyramidMaps(backbone("vrwkv_nano_patch4_32", patch_size=16, depth=4))
    sum(x.square().mean() for x in maps(torch.randn(2, 3, 64, 64))).backward()
    assert not [name for name, p in maps.named_parameters() if p.grad is None]


@pytest.mark.parametrize(
    ("name", "dense", "options", "millions"),
    [
        # With positions for 1024² and a final norm of 192 the release's file says 12,901,100.
        ("vim_tiny", {"channels": 192}, {"img_size": 1024, "global_pool": "avg"}, 12.900908),
        ("mambar_small", {"pyramid": {"transposed": False}}, {"img_size": 512}, 56),
        ("mambar_base", {"pyramid": {"transposed": False}}, {"img_size": 512}, 132),
        ("mambar_large", {"pyramid": {"transposed": False}}, {"img_size": 512}, 377),
    ],
)
def test_upernets_parameters_are_the_papers(name, dense, options, millions):
    with torch.device("meta"):
        model = build_segmenter(
            f"{name}_patch16_224", num_classes=150, dense={"maps": "pyramid", **dense}, **options
        )
    tolerance = 1e-9 if isinstance(millions, float) else 0.5
    assert count_parameters(model) / 1e6 == pytest.approx(millions, abs=tolerance)


def test_adapters_of_the_widest_backbone():
    with torch.device("meta"):
        adapter = ViTAdapter("mambar_large_patch16_224")
    attention = adapter.interactions[0].injector.attention
    assert (attention.heads, attention.value.out_features) == (16, 512)
