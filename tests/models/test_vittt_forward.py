"""The whole Vittt against a plain transcription, on a grid that is not square; its options."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch._dynamo.testing import CompileCounterWithBackend

from tolerances import assert_close
from vision_ttt.models.fitted_weights import checkpoint_filter_fn
from vision_ttt.models.vittt_ablations import ABLATIONS, model_name

NANO = "vittt_nano_patch4_32"


def nano(**options):
    torch.manual_seed(0)
    return timm.create_model(NANO, **{"num_classes": 10, "depth": 2, **options})


@pytest.fixture
def images():
    return torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0)).double()


def tokens_of(model, images):
    """Eq. 8: patches row by row, each flattened and projected, plus its position."""
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4)  # [B, C, h, w, 4, 4]
    patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # [B, T, C · 16]
    weight = model.patch_embed.proj.weight.flatten(1)
    return patches @ weight.T + model.patch_embed.proj.bias + model.pos_embed


def test_model_is_tokens_blocks_norm_mean_and_head(images):
    model = nano(img_size=(16, 24)).double().eval()
    x = tokens_of(model, images)
    for block in model.blocks:  # each is compared with the paper in tests/layers
        x = block(x, (4, 6))
    x = F.layer_norm(x, (96,), model.norm.weight, model.norm.bias, 1e-6)
    logits = x.mean(1) @ model.head.weight.T + model.head.bias
    assert_close(model(images), logits, 1e-12)


def test_feature_maps_keep_rows_and_columns(images):
    model = nano(img_size=(16, 24)).double().eval()
    (feature,) = model.forward_intermediates(images, indices=[0], intermediates_only=True)
    tokens = model.blocks[0](tokens_of(model, images), (4, 6))
    assert_close(feature[:, :, 1, 4], tokens[:, 1 * 6 + 4], 1e-12)


def test_tokens_lie_side_by_side_in_every_block(images):
    model = nano(img_size=(16, 24)).double().eval()
    dense = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: dense.append(inputs[0].is_contiguous()))
    model(images)
    assert dense == [True, True]


def test_positions_are_interpolated_to_the_images_grid(images):
    model = nano(dynamic_img_size=True).double().eval()
    wanted = nano(img_size=(16, 24)).double().eval()
    wanted.load_state_dict({
        **model.state_dict(),
        "pos_embed": resample_abs_pos_embed(model.pos_embed.data, [4, 6], [8, 8],
                                            num_prefix_tokens=0),
    })  # fmt: skip
    assert_close(model(images), wanted(images), 1e-6)  # timm interpolates in float32
    filtered = checkpoint_filter_fn(model.state_dict(), wanted)
    assert_close(filtered["pos_embed"], wanted.pos_embed, 1e-6)


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablations_name_is_what_it_says(name):
    with torch.device("meta"):
        model = timm.create_model(model_name(name), depth=1)
    ttt = model.blocks[0].mixer.ttt
    keywords = ABLATIONS[name].keywords
    assert ttt.learner.mini_batch_size == keywords.get("mini_batch_size", 16)
    assert model.global_pool == keywords.get("global_pool", "avg")
    placement = {"head": "head", "middle": "middle", "double": "double"}.get(model.global_pool)
    assert (model.class_tokens and model.class_tokens.placement) == placement
    states = {6: 2, 3: 1}[len(ttt.learner.w0)] if "design" not in keywords else None
    if "learnable_states" in keywords:
        states = states if isinstance(ttt.learner.w0, torch.nn.Parameter) else 0
        assert states == keywords["learnable_states"]
        assert name == f"w{states}"
    if "mini_batch_size" in keywords:
        assert name == f"b{keywords['mini_batch_size']}"
    design = keywords.get("design", "conv2d")
    route = ["ttt_layer", "shared_qk", "gating", "conv1d", "dual", "conv2d"]
    step = route.index(design)
    assert (ttt.widths["q"] == 0) == (step >= 1)
    assert (ttt.widths["gate"] > 0) == (step >= 2)
    assert (not isinstance(ttt.conv_q, torch.nn.Identity)) == (step >= 3)
    assert (ttt.learner.directions == 2) == (step >= 4)
    assert (model.blocks[0].mixer.conv2d is not None) == (step >= 5)


def test_keywords_reach_every_block():
    model = nano(mini_batch_size=8, learnable_states=1)
    for block in model.blocks:
        assert block.mixer.ttt.learner.mini_batch_size == 8
        assert len(block.mixer.ttt.learner.w0) == 3


def test_dropout_before_the_head():
    model = nano(drop_rate=0.5).train()
    tokens = torch.ones(1, 64, 96)
    dropped = (model.forward_head(tokens, pre_logits=True) == 0).float().mean()
    assert 0.2 < dropped < 0.8
    assert (model.eval().forward_head(tokens, pre_logits=True) == 1).all()


def _count_runs(block):
    runs = []
    block.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


def test_gradient_checkpointing_runs_each_block_again():
    model = nano()
    runs = _count_runs(model.blocks[0])
    images = torch.randn(1, 3, 32, 32)
    model(images).sum().backward()
    assert len(runs) == 1
    model.set_grad_checkpointing()
    model(images).sum().backward()
    assert len(runs) == 3


def test_stopping_early_and_pruning_leave_later_blocks_out():
    model = nano(depth=3)
    runs = _count_runs(model.blocks[2])
    images = torch.randn(1, 3, 32, 32)
    model.forward_intermediates(images, indices=[1], stop_early=True)
    assert not runs
    model.forward_intermediates(images, indices=[1])
    assert runs
    model.prune_intermediate_layers([1], prune_norm=True)
    assert len(model.blocks) == 2
    assert isinstance(model.norm, torch.nn.Identity)
    assert isinstance(model.head, torch.nn.Identity)


def test_max_norm_pool_is_by_l2_norm():
    tokens = torch.zeros(1, 3, 96)
    tokens[0, 0, :] = 1.0  # largest L1 norm: 96; L2 9.8
    tokens[0, 1, :2] = 8.0  # largest L2 norm: 11.3; L1 16
    tokens[0, 2, 0] = 9.0  # largest entry; L2 9
    assert torch.equal(nano(global_pool="max_norm").pool(tokens), tokens[:, 1])


def test_a_head_token_needs_a_scan_that_comes_back():
    with pytest.raises(ValueError, match=r"global_pool='head' needs .* it does not see"):
        nano(design="conv1d", global_pool="head")


def test_initial_scales():
    model = timm.create_model("vittt_tiny_patch16_224")
    for name, parameter in model.named_parameters():
        linear = name.endswith(("proj.weight", "fc1.weight", "fc2.weight", "head.weight"))
        if (linear and "patch_embed" not in name) or name.endswith(("w0", "pos_embed")):
            assert 0.018 < parameter.std() < 0.022, name


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["avg", "double"])
def test_one_compiled_graph_serves_changing_image_sizes(pool):
    model = nano(depth=1, dynamic_img_size=True, global_pool=pool).eval()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    with torch.no_grad():
        for height, width in [(16, 48), (24, 40), (64, 32), (36, 28), (20, 44)]:
            image = torch.randn(1, 3, height, width)
            assert_close(compiled(image), model(image), 1e-5)
    assert graphs.frame_count <= 2  # the first size's may be for its own kind alone


def test_exports_with_any_image_size():
    model = nano(depth=1, dynamic_img_size=True, global_pool="double").eval()
    height, width = (4 * torch.export.Dim(name, min=2, max=128) for name in ("rows", "columns"))
    image = torch.randn(1, 3, 40, 28)
    with torch.no_grad():
        program = torch.export.export(model, (image,), dynamic_shapes=({2: height, 3: width},))
        for size in ((40, 28), (16, 68)):
            image = torch.randn(1, 3, *size)
            assert_close(program.module()(image), model(image), 1e-5)
