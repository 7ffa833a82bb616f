"""H-ViT³ as its authors released it."""

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
from vision_ttt.convert.vit3 import H_VIT3
from vision_ttt.layers.rotary2d import rotary_table
from vision_ttt.models.h_vit3 import HViT3

GOLDEN = Path(__file__).parents[1] / "golden"
PUBLISHED = {  # parameters of the released models; MACs at 224² in G as their authors print them
    "hvit3_tiny": (28_703_560, 4.9),
    "hvit3_small": (54_362_056, 8.8),
    "hvit3_base": (94_369_304, 16.7),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_macs_are_the_papers(name):
    parameters, macs = PUBLISHED[name]
    with torch.device("meta"):
        model = timm.create_model(name)
    assert count_parameters(model) == parameters
    assert count_macs(model, (3, 224, 224)) / 1e9 == pytest.approx(macs, rel=0.01)


def test_macs_grow_linearly_with_the_pixels():
    with torch.device("meta"):
        model = timm.create_model("hvit3_tiny", num_classes=0)
    small, large = (count_macs(model, (3, size, size)) for size in (224, 896))
    assert large == 16 * small


def test_published_size_runs():
    model = timm.create_model("hvit3_tiny").eval()
    with torch.no_grad():
        logits = model(torch.randn(1, 3, 224, 224))
    assert abs(F.cross_entropy(logits, torch.tensor([5])).item() - math.log(1000)) < 1.0


def released_model():
    tensors = load_file(GOLDEN / "h_vit3_model.safetensors")
    description = json.loads((GOLDEN / "h_vit3_model.json").read_text())
    arguments = description["config"]["kwargs"]
    arguments["dims"] = arguments.pop("dim")
    model = HViT3(**arguments).eval()
    released = {key[8:]: x for key, x in tensors.items() if key.startswith("weights.")}
    model.load_state_dict(convert.remap(released, model))
    return model, tensors, description["tolerance"]


def test_released_model():
    model, tensors, tolerance = released_model()
    outputs = {}

    def keep(module, name):
        """Keep a map [B, D, h, w] as the release has it: tokens [B, T, D]."""
        module.register_forward_hook(
            lambda *a: outputs.update({name: a[2].flatten(2).transpose(1, 2)})
        )

    keep(model.stem, "stem")
    for index, stage in enumerate(model.stages[1:]):  # theirs end with the next one's downsampling
        keep(stage.downsample, f"stage{index}")
    keep(model.stages[3], "stage3")
    image = tensors["input.image"].requires_grad_()
    features = model.forward_features(image)
    outputs["features"] = model.forward_head(features, pre_logits=True)
    outputs["logits"] = model.forward_head(features)
    assert len(outputs) == sum(
        key.startswith("output.") and not key.startswith("output.grad.") for key in tensors
    )
    for key, got in outputs.items():
        assert_close(got, tensors[f"output.{key}"], tolerance["forward"], key)

    (outputs["logits"] * tensors["input.proj_logits"]).sum().backward()
    gradients = {H_VIT3.released_name(key): p.grad for key, p in model.named_parameters()}
    gradients["input.image"] = image.grad
    wanted = [key for key in tensors if key.startswith("output.grad.")]
    assert len(wanted) == 87
    for key in wanted:
        gradient = gradients[key.removeprefix("output.grad.")]
        assert_close(gradient, tensors[key].view_as(gradient), tolerance["gradients"], key)


def test_inference_is_the_same():
    model, tensors, tolerance = released_model()
    with torch.inference_mode():
        logits = model(tensors["input.image"])
    assert_close(logits, tensors["output.logits"], tolerance["forward"])


def test_constructor_takes_any_size_in_the_releases_order():
    model = HViT3(64, 7, (32, 48), (1, 2), (2, 3), in_chans=1)
    assert model(torch.randn(2, 1, 64, 64)).shape == (2, 7)
    assert [len(stage.blocks) for stage in model.stages] == [1, 2]
    with pytest.raises(ValueError, match=r"one entry for each stage, got \[32\], \[1, 2\] and"):
        HViT3(dims=(32,), depths=(1, 2), num_heads=(2, 3))
    with pytest.raises(ValueError, match="dim must be a multiple of num_heads, got 64 and 3"):
        HViT3(num_heads=(3, 4, 10, 16))


def test_strides_of_an_uneven_image_are_rounded_up():
    model = HViT3(dims=(32, 32, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)).eval()
    maps = model.forward_intermediates(torch.randn(1, 3, 70, 33), intermediates_only=True)
    assert [tuple(x.shape[2:]) for x in maps] == [(18, 9), (9, 5), (5, 3), (3, 2)]
    fixed = HViT3(64, 10, (32, 32), (1, 1), (1, 1), dynamic_img_size=False).eval()
    with pytest.raises(ValueError, match="70 × 33 pixels, the model was made for 64 × 64"):
        fixed(torch.randn(1, 3, 70, 33))
    with pytest.raises(TypeError, match=r"must be a tensor \[B, 3, H, W\], got a dict"):
        fixed({"patches": torch.randn(1, 4, 48)})
    fixed.set_input_size((70, 33))
    assert fixed(torch.randn(1, 3, 70, 33)).shape == (1, 10)


def test_stopping_early_gives_the_map_that_was_reached():
    model = HViT3(64, 10, (32, 48), (1, 1), (1, 1)).eval()
    x = torch.randn(1, 3, 64, 64)
    final, (first,) = model.forward_intermediates(x, indices=[0], stop_early=True)
    assert torch.equal(final.permute(0, 3, 1, 2), first)
    normed = model.forward_intermediates(x, norm=True, output_fmt="NHWC", intermediates_only=True)
    assert_close(normed[0].permute(0, 3, 1, 2), first, 1e-6)
    assert_close(normed[1], model.forward_features(x), 1e-6)


def test_pruned_of_its_last_stage_it_has_no_norm_either():
    model = HViT3(64, 10, (32, 48), (1, 1), (1, 1)).eval()
    x = torch.randn(1, 3, 64, 64)
    wanted = model.forward_intermediates(x, indices=[0], intermediates_only=True)[0]
    model.prune_intermediate_layers([0])
    assert_close(model.forward_features(x).permute(0, 3, 1, 2), wanted, 1e-6)


def test_rotations_of_every_stage_are_those_of_its_grid():
    """The released model's grids are square; rows and columns of these are not as many."""
    model, seen = HViT3(64, 10, (32, 48), (1, 1), (1, 1)).eval(), []
    for stage in model.stages:
        stage.blocks[0].ttt.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs))
    model(torch.randn(1, 3, 32, 64))
    assert [grid for _, grid, _ in seen] == [(8, 16), (4, 8)]
    for (_, grid, rotations), channels in zip(seen, (32, 48), strict=True):
        assert torch.equal(rotations, rotary_table(grid, channels))


def test_a_changed_size_is_saved_and_a_wrong_one_refused(tmp_path):
    model = timm.create_model(
        "hvit3_tiny", depths=(1, 1, 1, 1), img_size=64, dynamic_img_size=False
    )
    model.set_input_size(96)
    timm.models.save_for_hf(model, tmp_path)
    again, x = (
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True),
        torch.randn(1, 3, 96, 96),
    )
    assert torch.equal(again.eval()(x), model.eval()(x))
    with pytest.raises(TypeError, match="img_size"):
        model.set_input_size("x")


def test_pruned_it_takes_a_head_of_its_new_width():
    model = timm.create_model("hvit3_tiny", depths=(1, 1, 1, 1), img_size=64)
    model.prune_intermediate_layers([1])
    assert model.num_features == 128
    model.reset_classifier(5)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_it_runs_under_vmap():
    small = {"dims": (16, 32), "depths": (1, 1), "num_heads": (1, 2), "num_classes": 5}
    model, images = HViT3(**small).eval(), torch.randn(2, 3, 32, 32)
    each = torch.vmap(lambda image: model(image[None])[0])(images)
    assert_close(each, model(images), 1e-5)
