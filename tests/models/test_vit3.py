"""ViT³ as its authors released it."""

import json
import math
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tolerances import assert_close
from vision_ttt import convert
from vision_ttt.bench import count_macs, count_parameters
from vision_ttt.models.vit3 import ViT3

GOLDEN = Path(__file__).parents[1] / "golden"
PUBLISHED = {  # parameters of the released models; MACs at 224² in G as their authors print them
    "vit3_tiny_patch16_224": (6_149_416, 1.2),
    "vit3_small_patch16_224": (23_799_400, 4.8),
    "vit3_base_patch16_224": (90_055_912, 18.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_macs_are_the_papers(name):
    parameters, macs = PUBLISHED[name]
    with torch.device("meta"):
        model = timm.create_model(name)
    assert count_parameters(model) == parameters
    assert count_macs(model, (3, 224, 224)) / 1e9 == pytest.approx(macs, rel=0.02)


def test_nano_is_the_tiny_model_by_other_sizes():
    """Of these runs studies/results/backbones-digits.csv holds results."""
    sizes = {"patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 3, "mlp_ratio": 4.5}
    made = []
    for name, arguments in (("vit3_nano_patch4_32", {}), ("vit3_tiny_patch16_224", sizes)):
        torch.manual_seed(0)
        made.append(timm.create_model(name, num_classes=10, **arguments).state_dict())
    nano, tiny = made
    assert sum(x.numel() for x in nano.values()) == 569_386
    assert nano.keys() == tiny.keys()
    assert all(torch.equal(nano[key], tiny[key]) for key in nano)


def test_macs_grow_linearly_with_the_tokens():
    with torch.device("meta"):
        model = timm.create_model("vit3_tiny_patch16_224", num_classes=0)
    small, large = (count_macs(model, (3, size, size)) for size in (224, 896))
    assert large == 16 * small


def test_published_size_runs():
    logits = timm.create_model("vit3_tiny_patch16_224")(torch.randn(1, 3, 224, 224))
    assert abs(F.cross_entropy(logits, torch.tensor([5])).item() - math.log(1000)) < 1.0


def test_released_model():
    tensors = load_file(GOLDEN / "vit3_model.safetensors")
    description = json.loads((GOLDEN / "vit3_model.json").read_text())
    tolerance = description["tolerance"]
    model = ViT3(**description["config"]["kwargs"]).eval()
    released = {key[8:]: x for key, x in tensors.items() if key.startswith("weights.")}
    model.load_state_dict(convert.remap(released, model))

    outputs = {}
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *a, name=f"block{index}": outputs.update({name: a[2]}))
    image = tensors["input.image"].requires_grad_()
    tokens = model.forward_features(image)
    outputs["features"] = model.forward_head(tokens, pre_logits=True)
    outputs["logits"] = model.forward_head(tokens)
    assert_close(model(image), outputs["logits"], 1e-6)
    for key, got in outputs.items():
        assert_close(got, tensors[f"output.{key}"], tolerance["forward"], key)

    (outputs["logits"] * tensors["input.proj_logits"]).sum().backward()
    gradients = {key.replace(".ttt.", ".attn."): p.grad for key, p in model.named_parameters()}
    gradients["input.image"] = image.grad
    wanted = [key for key in tensors if key.startswith("output.grad.")]
    assert len(wanted) == 28
    for key in wanted:
        gradient = gradients[key.removeprefix("output.grad.")]
        assert_close(gradient, tensors[key].view_as(gradient), tolerance["gradients"], key)


def test_constructor_takes_any_size_in_the_releases_order():
    model = ViT3(32, 8, 1, 7, 48, 2, 3, 2.0, False)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    assert model.blocks[1].mlp.fc1.out_features == 96
    assert model.blocks[1].ttt.qkv.bias is None
    with pytest.raises(ValueError, match="dim must be a multiple of num_heads, got 192 and 5"):
        ViT3(num_heads=5)


def test_images_must_be_whole_patches_or_padded():
    model = ViT3(depth=1, num_classes=4).eval()
    x = torch.randn(1, 3, 30, 45)
    with pytest.raises(ValueError, match=r"not whole patches of 16 × 16.*dynamic_img_pad"):
        model(x)
    padding = ViT3(depth=1, num_classes=4, dynamic_img_pad=True).eval()
    padding.load_state_dict(model.state_dict())
    assert_close(padding(x), model(F.pad(x, (0, 3, 0, 2))), 1e-6)


def test_feature_maps_keep_rows_and_columns():
    model = ViT3(depth=1, embed_dim=32, num_heads=2, patch_size=4).eval()
    x = torch.randn(1, 3, 16, 24)
    maps, tokens = (
        model.forward_intermediates(x, output_fmt=layout, intermediates_only=True)[0]
        for layout in ("NCHW", "NLC")
    )
    assert torch.equal(maps[:, :, 1, 4], tokens[:, 1 * 6 + 4])


def test_set_input_size_changes_the_patch():
    model = ViT3(64, depth=1, dynamic_img_size=False, num_classes=4).eval()
    with pytest.raises(ValueError, match="32 × 32 pixels, the model was made for 64 × 64"):
        model(torch.randn(1, 3, 32, 32))
    model.set_input_size(32, 8)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 4)
    assert model.feature_info[0]["reduction"] == 8
