"""torch.fx and its users: graphs of the ops that compute what the model computes."""

import copy
import warnings

import pytest
import timm
import torch
from torch import fx
from torchvision.models.feature_extraction import create_feature_extractor

from tolerances import assert_close
from vision_ttt.models import create_model, list_models

DESIGNS = ("ttt_layer", "shared_qk", "gating", "conv1d", "dual", "conv2d")
PLAIN = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 1}
FIXED = {**PLAIN, "dynamic_img_size": False}
ANY = {**PLAIN, "dynamic_img_size": True}
SCANS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2}
STAGES = {"img_size": 32, "dims": (16, 32), "depths": (1, 1), "num_heads": (1, 1)}

CASES = [
    *(("vittt_tiny_patch16_224", {**FIXED, "design": design}) for design in DESIGNS),
    *(("vittt_tiny_patch16_224", {**ANY, "global_pool": pool}) for pool in ("head", "double")),
    *(("vittt_tiny_patch16_224", {**ANY, "learnable_states": states}) for states in (0, 1)),
    ("vittt_tiny_patch16_224", {**ANY, "dynamic_img_pad": True, "drop_path_rate": 0.5}),
    ("vittt_tiny_patch16_224", {**ANY, "global_pool": "max_norm", "inner_model": "mlp"}),
    ("vit3_tiny_patch16_224", {**FIXED, "dynamic_img_pad": True}),
    ("vit3_tiny_patch16_224", {**ANY, "drop_path_rate": 0.5}),
    ("hvit3_tiny", {**STAGES, "dynamic_img_size": False}),
    ("hvit3_tiny", STAGES),
    ("vim_tiny_patch16_224", SCANS),
    ("vim_tiny_patch16_224", {**SCANS, "dynamic_img_size": True, "drop_path_rate": 0.5}),
    ("mambar_small_patch16_224", {**SCANS, "num_registers": 3}),
    ("mambar_tiny_patch16_224", {**SCANS, "dynamic_img_size": True, "distribution": "none"}),
    ("vrwkv_small_patch16_224", {**SCANS, "dynamic_img_size": True, "drop_path_rate": 0.5}),
    ("linear_vit", PLAIN),
    ("linear_vit", {**PLAIN, "class_token": "keep", "inner": "vit3", "drop_path_rate": 0.5}),
    ("linear_vit", {**PLAIN, "base": "vit_small_patch14_reg4_dinov2", "inner": "ttt_linear"}),
    ("dit3_nano_patch4_32", {"img_size": 16, "hidden_size": 32, "depth": 1, "num_heads": 1}),
]


def made(name, **options):
    """A model in which every parameter affects the output."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=4, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs(name, *size):
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    if name.startswith("dit3"):
        return images, torch.tensor([0.2, 0.7]), torch.tensor([3, 0])
    return (images,)


def outcome(model, x):
    """The output of a model, or the message of its error."""
    try:
        return model(*x)
    except ValueError as error:
        return str(error)


def functions(graph):
    """Names of the functions that a traced graph calls."""
    return {node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"}


def test_every_family_is_traced():
    families = {name.split("_")[0] for name in list_models()}
    assert families == {name.split("_")[0] for name, _ in CASES}


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_traced_graph_computes_what_the_model_does(name, options):
    model = made(name, **options)
    size = (options["img_size"],) * 2
    x = inputs(name, *size)
    wanted = model(*x)
    with torch.no_grad():
        graph = fx.symbolic_trace(model)
    assert_close(graph(*x), wanted, 1e-5)
    assert_close(copy.deepcopy(graph)(*inputs(name, *size)), wanted, 1e-5)
    model.train()
    graph = fx.symbolic_trace(model)
    torch.manual_seed(2)
    got = torch.autograd.grad(graph(*x).square().sum(), list(model.parameters()))
    torch.manual_seed(2)
    wanted = torch.autograd.grad(model(*x).square().sum(), list(model.parameters()))
    for key, a, b in zip(dict(model.named_parameters()), got, wanted, strict=True):
        assert_close(a, b, 1e-4, key)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_other_sizes_are_as_in_the_model(name, options):
    model = made(name, **options)
    graph = fx.symbolic_trace(model)
    for size in ((48, 16), (28, 40), (27, 40)):
        x = inputs(name, *size)
        wanted, got = outcome(model, x), outcome(graph, x)
        assert type(wanted) is type(got)
        if isinstance(wanted, str):
            assert got == wanted
        else:
            assert_close(got, wanted, 1e-5)
    with pytest.raises(ValueError, match=r"must be \[B, 3, H, W\], got"):
        graph(*inputs(name, 32))


def test_ops_are_nodes():
    names = functions(fx.symbolic_trace(made("vittt_nano_patch4_32", depth=1)))
    wanted = {"ttt_linear", "directional_conv1d", "depthwise_conv2d", "gated_norm", "swiglu"}
    assert wanted < names
    assert "ttt_mlp" in functions(
        fx.symbolic_trace(made("vittt_nano_patch4_32", depth=1, inner_model="mlp"))
    )
    names = functions(fx.symbolic_trace(made("vim_tiny_patch16_224", **SCANS)))
    assert {"selective_scan", "directional_conv1d"} < names
    names = functions(fx.symbolic_trace(made("hvit3_tiny", **STAGES)))
    assert {"gated_unit", "gated_unit_step", "depthwise", "depthwise_step"} < names


def test_tracing_leaves_no_trace():
    """After tracing the model computes as before."""
    model = made("vittt_nano_patch4_32", depth=1)
    (x,) = inputs("vittt", 32, 32)
    with torch.no_grad():
        before = model(x)
        fx.symbolic_trace(model)
        assert torch.equal(model(x), before)
    model.set_grad_checkpointing()
    assert_close(fx.symbolic_trace(model)(x), before, 1e-5)


def test_torchvisions_feature_extractor():
    model = made("vittt_nano_patch4_32", depth=2)
    (x,) = inputs("vittt", 32, 32)
    names = {"blocks.0": "first", "blocks.1.mixer.ttt.learner": "learner", "head": "logits"}
    extractor = create_feature_extractor(model, names).eval()
    got = extractor(x)
    (first,) = model.forward_intermediates(
        x, indices=[0], output_fmt="NLC", intermediates_only=True
    )
    assert_close(got["first"], first, 1e-5)
    assert got["learner"].shape == (2, 64, 6, 32)
    assert_close(got["logits"], model(x), 1e-5)
    extractor.train()(x)["logits"].sum().backward()
    with pytest.raises(ValueError, match="images are 36 × 32 pixels"):
        extractor(torch.zeros(1, 3, 36, 32))


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("vittt_tiny_patch16_224", PLAIN, [(2, 16, 32), (2, 16, 32)]),
        ("vit3_tiny_patch16_224", PLAIN, [(2, 16, 32), (2, 16, 32)]),
        ("mambar_tiny_patch16_224", SCANS, [(2, 28, 32), (2, 28, 32)]),
        ("hvit3_tiny", STAGES, [(2, 16, 8, 8), (2, 32, 4, 4)]),
    ],
)
def test_timms_graph_extractor(name, options, shapes):
    wanted = {"features_only": True, "feature_cls": "fx", "out_indices": (0, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchvision's, of training beside evaluation
        maps = timm.create_model(name, **options, **wanted).eval()(*inputs(name, 32, 32))
    assert [tuple(x.shape) for x in maps] == shapes
