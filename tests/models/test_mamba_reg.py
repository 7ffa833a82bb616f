"""Mamba-Reg as its authors released it, its registers and its sizes."""

import math

import pytest
import torch
import torch.nn.functional as F
from timm.models import group_parameters
from timm.models._features import FeatureGetterNet

import mamba_goldens
from tolerances import assert_close
from vision_ttt.bench import count_parameters
from vision_ttt.models import MambaReg, create_model
from vision_ttt.models.fitted_weights import checkpoint_filter_fn

PARAMETERS = {
    "mambar_tiny_patch16_224": 9_264_232,
    "mambar_small_patch16_224": 27_801_064,
    "mambar_base_patch16_224": 99_301_096,
    "mambar_large_patch16_224": 341_222_376,
}
DISTRIBUTIONS = {  # positions of 3 registers among 16 image tokens
    "even": (4, 9, 14),
    "front": (0, 1, 2),
    "middle": (8, 9, 10),
    "end": (16, 17, 18),
}


def small(**options):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_classes": 5}
    return MambaReg(**{**sizes, "num_registers": 3, **options}).eval()


def images(*shape):
    return torch.randn(*(shape or (2, 3, 32, 32)), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["mambar_model_cls3_reduce1", "mambar_model_cls3_reduce3"])
def test_released_model(name):
    tensors, arguments, tolerance = mamba_goldens.read(name)
    model = MambaReg(**mamba_goldens.mamba_reg_arguments(arguments))
    mamba_goldens.check(model, tensors, tolerance)
    _, (_, positions) = model.embed(tensors["input.image"])
    assert positions == tuple(tensors["output.cls_positions"].tolist())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_releases(name):
    with torch.device("meta"):
        assert count_parameters(create_model(name)) == PARAMETERS[name]


def test_nano_has_as_many_parameters_as_vittts():
    with torch.device("meta"):
        ours, vittt = (
            count_parameters(create_model(f"{name}_nano_patch4_32", num_classes=10))
            for name in ("mambar", "vittt")
        )
    assert (ours, vittt) == (583_402, 571_650)


def test_starts_near_chance_and_trains_every_parameter():
    model = create_model("mambar_nano_patch4_32", num_classes=10, head_reduction=2)
    loss = F.cross_entropy(model(images(8, 3, 32, 32)), torch.arange(8))
    assert abs(loss.item() - math.log(10)) < 0.35
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_distributions(distribution):
    model = small(distribution=distribution)
    tokens, (grid, positions) = model.embed(images())
    assert (grid, positions) == ((4, 4), DISTRIBUTIONS[distribution])
    registers = model.class_tokens.tokens + model.class_tokens.pos_embed
    assert torch.equal(tokens[:, list(positions)], registers.expand(2, -1, -1))
    features = model.forward_features(images())
    feature = model.forward_head(features, pre_logits=True)
    assert torch.equal(feature, features[:, list(positions)].flatten(1))
    assert feature.shape == (2, model.head_hidden_size) == (2, 96)
    assert model.num_features == 32


def test_without_registers():
    model = small(distribution="none")
    assert model.class_tokens is None
    features = model.forward_features(images())
    assert features.shape == (2, 16, 32)
    assert model.global_pool == "avg"
    assert torch.equal(model.forward_head(features, pre_logits=True), features.mean(1))
    for pool in ("registers", "even"):
        with pytest.raises(ValueError, match=r"global_pool must be one of .*'avg', 'max_norm', ''"):
            small(distribution="none", global_pool=pool)


@pytest.mark.parametrize(("reduction", "width"), [(2, 16), (8, 4), (0.5, 64), (1 / 3, 96)])
def test_reduction_of_the_head(reduction, width):
    model = small(head_reduction=reduction)
    assert model.neck.reduce.weight.shape == (width, 32)
    assert model.head.in_features == model.head_hidden_size == 3 * width
    features = model.forward_features(images())
    registers = features[:, list(DISTRIBUTIONS["even"])]
    narrow = F.linear(registers, model.neck.reduce.weight).flatten(1)
    wanted = narrow / (narrow.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(model.forward_head(features, pre_logits=True), wanted, 1e-5)


def test_other_poolings_have_no_neck():
    """Table 4's mean of the registers, and the image tokens."""
    model = small(head_reduction=2)
    x = images()
    features = model.forward_features(x)
    weight = model.neck.reduce.weight
    model.reset_classifier(7)
    assert model.neck.reduce.weight is weight
    for pool in ("even", "avg", "max_norm"):
        model.reset_classifier(7, pool)
        assert model.neck is None
        assert model.head.in_features == model.head_hidden_size == 32
        fresh = small(head_reduction=2, global_pool=pool, num_classes=7)
        assert fresh.state_dict().keys() == model.state_dict().keys()
        assert model(x).shape == (2, 7)
    model.reset_classifier(0, "even")
    assert_close(model(x), features[:, list(DISTRIBUTIONS["even"])].mean(1), 1e-6)
    model.double().train().reset_classifier(3, "registers")
    assert model.neck.reduce.weight.dtype == torch.float64
    assert model.neck.training
    assert model(x.double()).shape == (2, 3)


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (8, 8), (64, 8)])
@pytest.mark.parametrize("distribution", [*DISTRIBUTIONS, "none"])
def test_any_size(distribution, size):
    model = small(dynamic_img_size=True, head_reduction=2, distribution=distribution)
    x = images(2, 3, *size)
    assert model(x).shape == (2, 5)
    maps = model.forward_intermediates(x, intermediates_only=True)
    assert [tuple(each.shape) for each in maps] == [(2, 32, size[0] // 8, size[1] // 8)] * 2


def test_registers_follow_the_grid():
    model, resized = small(dynamic_img_size=True), small()
    resized.set_input_size((24, 40))
    loaded = small(img_size=(24, 40))
    loaded.load_state_dict(checkpoint_filter_fn(model.state_dict(), loaded))
    x = images(2, 3, 24, 40)
    for other in (resized, loaded):
        assert other.embed(x)[1] == ((3, 5), (3, 7, 11))
        assert_close(other(x), model(x), 1e-6)
    with pytest.raises(ValueError, match="24 × 40 pixels, the model was made for 32 × 32"):
        small()(x)


def test_a_model_of_maps_has_no_neck():
    """It would be left without a gradient."""
    net = FeatureGetterNet(small(head_reduction=2), out_indices=(0,))
    (maps,) = net(images())
    assert maps.shape == (2, 32, 4, 4)
    used = {key for key, _ in net.named_parameters()}
    maps.sum().backward()
    assert used == {key for key, p in net.named_parameters() if p.grad is not None}


def test_registers_of_each_depth():
    pairs = small().forward_intermediates(
        images(), norm=True, return_prefix_tokens=True, intermediates_only=True
    )
    assert [tuple(registers.shape) for _, registers in pairs] == [(2, 3, 32)] * 2


def test_layer_groups_and_parameters_that_do_not_decay():
    model = small(head_reduction=2)
    groups = group_parameters(model, model.group_matcher())
    assert groups[0][0] == "pos_embed"
    assert "class_tokens.pos_embed" in groups[0]
    assert len(groups) == 4
    assert groups[3] == ["head.weight", "head.bias", "neck.reduce.weight", "neck.norm.weight"]
    parts = {key.split(".")[-1] for key in model.no_weight_decay()}
    assert parts == {"tokens", "pos_embed", "A_log", "D", "dt_bias"}


def test_large_activations_in_mixed_precision():
    model = small(dynamic_img_size=True, patch_size=4, head_reduction=2).train()
    x = 100 * images(2, 3, 64, 64)
    wanted = model.forward_features(x)
    with torch.autocast("cpu", torch.bfloat16):
        features = model.forward_features(x)
        feature = model.forward_head(features, pre_logits=True)
        logits = model.forward_head(features)
    assert features.dtype == feature.dtype == torch.float32
    assert_close(features, wanted, 1.5e-2)
    assert_close(logits, model.forward_head(wanted), 3e-2)
    F.cross_entropy(logits.float(), torch.tensor([0, 1])).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_reduction": 5}, "head_reduction is 5; it must divide embed_dim = 32"),
        ({"head_reduction": 64}, "head_reduction is 64; it must divide embed_dim = 32"),
        ({"head_reduction": -1}, "head_reduction is -1"),
        ({"distribution": "head"}, "distribution must be one of .*'front'.* got 'head'"),
        ({"global_pool": "middle"}, "global_pool must be one of .*'even'.* got 'middle'"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
