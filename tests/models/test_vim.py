"""Vim as its authors released it, and its sizes."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import group_parameters
from timm.optim import create_optimizer_v2

import mamba_goldens
from tolerances import assert_close
from vision_ttt.bench import count_macs, count_parameters
from vision_ttt.models import Vim, create_model
from vision_ttt.models.fitted_weights import checkpoint_filter_fn

PARAMETERS = {
    "vim_tiny_patch16_224": 7_148_008,
    "vim_small_patch16_224": 25_796_584,
    "vim_base_patch16_224": 97_598_440,
}


def small(**options):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_classes": 5}
    return Vim(**{**sizes, **options}).eval()


def images(*shape):
    return torch.randn(*(shape or (2, 3, 32, 32)), generator=torch.Generator().manual_seed(0))


def test_released_model():
    tensors, arguments, tolerance = mamba_goldens.read("vim_model")
    mamba_goldens.check(Vim(**mamba_goldens.vim_arguments(arguments)), tensors, tolerance)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_releases(name):
    with torch.device("meta"):
        assert count_parameters(create_model(name)) == PARAMETERS[name]


def test_nano_has_as_many_parameters_as_vittts():
    with torch.device("meta"):
        vim, vittt = (
            count_parameters(create_model(f"{name}_nano_patch4_32", num_classes=10))
            for name in ("vim", "vittt")
        )
    assert (vim, vittt) == (579_946, 571_650)


def test_macs_grow_linearly_with_the_tokens():
    counts = []
    for size in (224, 896):
        with torch.device("meta"):
            model = create_model(
                "vim_tiny_patch16_224", num_classes=0, global_pool="avg", img_size=size
            )
            counts.append(count_macs(model, (3, size, size)))
    assert counts[1] == 16 * counts[0]


def test_starts_near_chance_and_trains_every_parameter():
    model = create_model("vim_nano_patch4_32", num_classes=10)
    loss = F.cross_entropy(model(images(8, 3, 32, 32)), torch.arange(8))
    assert abs(loss.item() - math.log(10)) < 0.35
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, key


def test_learns():
    model = small(num_classes=8).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, losses = images(8, 3, 32, 32), []
    for _ in range(15):
        loss = F.cross_entropy(model(x), torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("pool", ["middle", "head", "end", "double", "avg", "max_norm"])
@pytest.mark.parametrize("size", [(32, 32), (24, 40), (8, 8)])
def test_any_size(pool, size):
    model = small(dynamic_img_size=True, global_pool=pool)
    x = images(2, 3, *size)
    assert model(x).shape == (2, 5)
    maps = model.forward_intermediates(x, intermediates_only=True)
    assert [tuple(each.shape) for each in maps] == [(2, 32, size[0] // 8, size[1] // 8)] * 2
    tokens = {"avg": 0, "max_norm": 0, "double": 2}.get(pool, 1)
    assert model.forward_features(x).shape[1] == size[0] * size[1] // 64 + tokens


def test_the_class_token_is_the_feature():
    model = small()
    tokens = model.forward_features(images())
    assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, 8])


def test_another_image_size():
    with pytest.raises(ValueError, match="24 × 40 pixels, the model was made for 32 × 32"):
        small()(images(2, 3, 24, 40))
    model, resized = small(dynamic_img_size=True), small()
    resized.set_input_size((24, 40))
    loaded = small(img_size=(24, 40))
    loaded.load_state_dict(checkpoint_filter_fn(model.state_dict(), loaded))
    x = images(2, 3, 24, 40)
    for other in (resized, loaded):
        assert_close(other(x), model(x), 1e-6)
    with pytest.raises(ValueError, match="not whole patches of 8 × 8"):
        model(images(2, 3, 30, 32))
    padding = small(dynamic_img_size=True, dynamic_img_pad=True)
    assert_close(padding(images(1, 3, 30, 27)), model(F.pad(images(1, 3, 30, 27), (0, 5, 0, 2))), 0)


@pytest.mark.parametrize("stride", [2, 4])
def test_patches_that_overlap(stride):
    """As of a model of single pixels' patches: each token is a product of a window of pixels."""
    model = small(stride=stride, dynamic_img_size=True)
    side = (32 - 8) // stride + 1
    assert model.patch_embed.grid_size == (side, side)
    assert model.pos_embed.shape == (1, side**2, 32)
    x = images()
    tokens, (grid, _) = model.embed(x)
    assert grid == (side, side)
    image, _ = model.split_tokens(tokens)
    window = x[:, :, stride : stride + 8, 2 * stride : 2 * stride + 8]
    wanted = torch.einsum("bcij,dcij->bd", window, model.patch_embed.proj.weight)
    position = side + 2
    got = image[:, position] - model.pos_embed[:, position] - model.patch_embed.proj.bias
    assert_close(got, wanted, 1e-5)
    maps = model.forward_intermediates(images(2, 3, 24, 40), intermediates_only=True)
    assert maps[0].shape == (2, 32, (24 - 8) // stride + 1, (40 - 8) // stride + 1)
    assert model.feature_info[0]["reduction"] == stride
    for size in ((33, 32), (4, 32)):
        with pytest.raises(ValueError, match=r"not whole patches of 8 × 8 at a stride of"):
            model(images(1, 3, *size))
    model.set_input_size(24)
    assert model.patch_embed.grid_size == ((24 - 8) // stride + 1,) * 2
    with pytest.raises(ValueError, match="patch_size is 4; patches that overlap keep theirs"):
        model.set_input_size(24, 4)
    for size in (33, 4, (24, 0)):
        with pytest.raises(ValueError, match=r"not whole patches of 8 × 8|img_size is 0"):
            model.set_input_size(size)
    assert model.patch_embed.img_size == (24, 24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 9}, "stride is 9; accepted: 1 to patch_size, 8"),
        ({"stride": 5, "patch_size": (8, 4)}, r"accepted: 1 to patch_size, \(8, 4\)"),
        ({"stride": 5}, "images of 32 × 32 pixels are not whole patches of 8 × 8 at a stride of 5"),
        ({"stride": 4, "dynamic_img_pad": True}, "dynamic_img_pad is not supported for patches"),
    ],
)
def test_strides_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
    assert small(stride=8).state_dict().keys() == small().state_dict().keys()
    assert small(stride=4, patch_size=(8, 8)).patch_embed.grid_size == (7, 7)


def test_parameters_that_do_not_decay():
    model = small()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    names = {id(p): key for key, p in model.named_parameters()}
    decayed = {
        names[id(p)] for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]
    }
    assert {key.removeprefix("blocks.1.mixer.") for key in decayed if "blocks.1" in key} == {
        *("in_proj.weight", "conv.weight", "x_proj", "dt_proj", "out_proj.weight")
    }
    assert {key for key in decayed if "blocks" not in key} == {
        *("patch_embed.proj.weight", "head.weight")
    }
    groups = group_parameters(model, model.group_matcher())
    assert groups[0][0] == "pos_embed"
    assert [len(groups[i]) for i in (1, 2)] == [10, 11]  # the last block with the norm


def test_large_activations_in_mixed_precision():
    """Images a hundred times as bright as normalised ones, and more tokens than a scan's chunk."""
    model = small(dynamic_img_size=True, patch_size=4).train()
    with torch.autocast("cpu", torch.bfloat16):
        tokens = model.forward_features(100 * images(2, 3, 64, 64))
        logits = model.forward_head(tokens)
    assert tokens.dtype == torch.float32
    assert tokens.shape[1] == 257
    F.cross_entropy(logits.float(), torch.tensor([0, 1])).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), key
    with torch.no_grad():
        exact = model.double().forward_features(100 * images(2, 3, 64, 64).double())
    assert_close(tokens, exact, 2e-2)


def test_one_graph_with_gradients():
    torch.compiler.reset()
    model = small().double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, gradients = images().double(), []
    for each in (compiled, model):
        loss = F.cross_entropy(each(x), torch.tensor([0, 3]))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for key, got, wanted in zip(dict(model.named_parameters()), *gradients, strict=True):
        assert_close(got, wanted, 1e-9, key)


def test_exports_for_any_batch_and_size():
    model = small(dynamic_img_size=True)
    batch, height, width = (torch.export.Dim(name, min=2, max=64) for name in ("b", "h", "w"))
    shapes = ({0: batch, 2: 8 * height, 3: 8 * width},)
    program = torch.export.export(model, (images(3, 3, 40, 48),), dynamic_shapes=shapes).module()
    for shape in ((3, 3, 40, 48), (2, 3, 64, 24)):
        assert_close(program(images(*shape)), model(images(*shape)), 1e-5)


def test_stochastic_depth_rises_and_outputs_start_smaller_in_deeper_models():
    rates = [block.drop_path.drop_prob for block in small(depth=3, drop_path_rate=0.4).blocks]
    assert rates == pytest.approx([0, 0.2, 0.4])
    shallow, deep = (small(depth=depth).blocks[0].mixer.out_proj.weight for depth in (1, 4))
    assert deep.std().item() == pytest.approx(shallow.std().item() / 2, rel=0.1)


def test_published_size_runs():
    model = timm.create_model("vim_tiny_patch16_224", depth=2)
    logits = model(torch.randn(1, 3, 224, 224))
    assert abs(F.cross_entropy(logits, torch.tensor([5])).item() - math.log(1000)) < 1.0
