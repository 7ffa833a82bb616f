"""The base of plain backbones, by a model that is not the package's own, and by goldens."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.layers import RmsNorm
from timm.models import group_parameters
from timm.models._features import FeatureGetterNet
from timm.optim import create_optimizer_v2
from torch import fx, nn

from tolerances import assert_close
from vision_ttt.layers import ExtraTokens
from vision_ttt.models import create_model
from vision_ttt.models.classifier import linear_head
from vision_ttt.models.image_size import patch_embedding, position_embedding
from vision_ttt.models.plain_backbone import PlainBackbone

GOLDEN = Path(__file__).parents[1] / "golden"


class MeanBlock(nn.Module):
    """Mix tokens in the simplest way there is; records what it is called with."""

    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(dim, dim) / dim**0.5)
        self.calls = []

    def no_weight_decay(self):
        return {"scale"}

    def forward(self, x, grid, extra=()):
        self.calls.append((tuple(grid), tuple(extra)))
        return x + torch.tanh(x + x.mean(1, keepdim=True)) @ self.scale


class Registers(PlainBackbone):
    """Registers, evenly spread among the image tokens, feed the head through a narrow neck."""

    def __init__(self, img_size=32, dim=32, depth=3, registers=4, reduction=2, num_classes=5):
        patch_embed = patch_embedding(img_size, 8, 3, dim, pad=False)
        super().__init__(
            patch_embed=patch_embed,
            pos_embed=position_embedding(patch_embed),
            class_tokens=ExtraTokens(dim, "even", registers, pos_embed=True),
            blocks=[MeanBlock(dim) for _ in range(depth)],
            norm=RmsNorm(dim),
            head=linear_head(registers * dim // reduction, num_classes),
            global_pool="even",
            dynamic_img_size=True,
        )
        self.head_hidden_size = registers * dim // reduction
        self.neck = nn.Linear(dim, dim // reduction, bias=False)

    def pool(self, x):
        if self.global_pool != "even":
            return super().pool(x)
        _, registers = self.class_tokens.extract(x)
        return self.neck(registers).flatten(1)


def images(*shape):
    return torch.randn(*(shape or (2, 3, 32, 32)), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Registers().eval()


def golden_tokens(name, placement, count, positions, registers):
    """The tokens that a golden model's blocks get, of a backbone with its weights."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    description = json.loads((GOLDEN / f"{name}.json").read_text())
    arguments = description["config"]["kwargs"]
    size, patch, dim = arguments["img_size"], arguments["patch_size"], arguments["embed_dim"]
    patch_embed = patch_embedding(size, patch, 3, dim, pad=False)
    model = PlainBackbone(
        patch_embed=patch_embed,
        pos_embed=position_embedding(patch_embed),
        class_tokens=ExtraTokens(dim, placement, count, pos_embed=True),
        blocks=[],
        norm=nn.Identity(),
        head=nn.Identity(),
        global_pool="",
    )
    model.load_state_dict({
        "patch_embed.proj.weight": tensors["weights.patch_embed.proj.weight"],
        "patch_embed.proj.bias": tensors["weights.patch_embed.proj.bias"],
        "pos_embed": positions(tensors),
        "class_tokens.tokens": tensors["weights.cls_token"],
        "class_tokens.pos_embed": registers(tensors),
    })  # fmt: skip
    got = model.forward_features(tensors["input.image"])
    assert_close(got, tensors["output.tokens"], description["tolerance"]["forward"])


def test_tokens_of_mamba_regs_release():
    golden_tokens(
        "mambar_model_cls3_reduce1",
        "even",
        3,
        lambda tensors: tensors["weights.pos_embed"],
        lambda tensors: tensors["weights.pos_embed_cls"],
    )


def test_tokens_of_vims_release():
    """Its position embedding is of the whole sequence, in which the class token is the ninth."""
    golden_tokens(
        "vim_model",
        "middle",
        1,
        lambda tensors: torch.cat(tensors["weights.pos_embed"].split((8, 1, 8), 1)[::2], dim=1),
        lambda tensors: tensors["weights.pos_embed"][:, 8:9],
    )


def test_blocks_get_the_grid_and_the_positions_of_class_tokens(model):
    model(images(1, 3, 24, 40))
    assert [block.calls for block in model.blocks] == [[((3, 5), (3, 7, 11, 15))]] * 3
    plain = PlainBackbone(
        patch_embed=patch_embedding(32, 8, 3, 32, pad=False),
        blocks=[MeanBlock(32)],
        norm=nn.LayerNorm(32),
        head=linear_head(32, 5),
    )
    assert plain(images()).shape == (2, 5)
    assert plain.blocks[0].calls == [((4, 4), ())]


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (8, 8), (64, 8)])
def test_any_size(model, size):
    x = images(2, 3, *size)
    assert model(x).shape == (2, 5)
    maps = model.forward_intermediates(x, intermediates_only=True)
    assert [tuple(each.shape) for each in maps] == [(2, 32, size[0] // 8, size[1] // 8)] * 3


def test_registers_are_no_part_of_the_maps(model):
    final, pairs = model.forward_intermediates(
        images(), norm=True, output_fmt="NLC", return_prefix_tokens=True
    )
    tokens, registers = model.class_tokens.extract(final)
    assert torch.equal(pairs[-1][0], tokens)
    assert torch.equal(pairs[-1][1], registers)
    assert registers.shape == (2, 4, 32)
    assert torch.equal(model.forward_head(final), model(images()))


def test_a_subclass_pools_in_its_own_way(model):
    features = model.forward_features(images())
    assert model.forward_head(features, pre_logits=True).shape == (2, model.head_hidden_size)
    model.reset_classifier(7)
    assert model(images()).shape == (2, 7)
    assert model.head.in_features == 4 * 32 // 2
    model.reset_classifier(0, "")
    assert torch.equal(model(images()), features)
    with pytest.raises(ValueError, match=r"global_pool must be one of .*'even'.* got 'middle'"):
        model.reset_classifier(5, "middle")


def test_timms_features_only(model):
    whole = model.forward_intermediates(images(), indices=[0, 1], intermediates_only=True)
    net = FeatureGetterNet(model, out_indices=(0, 1)).eval()
    assert net.feature_info.channels() == [32, 32]
    assert net.feature_info.reduction() == [8, 8]
    for got, wanted in zip(net(images()), whole, strict=True):
        assert torch.equal(got, wanted)
    assert len(net.model.blocks) == 2


def test_parameters_that_do_not_decay(model):
    named = {"pos_embed", "class_tokens.tokens", "class_tokens.pos_embed"}
    assert model.no_weight_decay() == named | {f"blocks.{i}.scale" for i in range(3)}
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    names = {id(p): key for key, p in model.named_parameters()}
    decayed = {
        names[id(p)] for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]
    }
    assert decayed == {"patch_embed.proj.weight", "neck.weight", "head.weight"}


def test_every_parameter_before_the_head_has_a_layer(model):
    groups = group_parameters(model, model.group_matcher())
    assert groups[0] == [
        "pos_embed",
        "patch_embed.proj.weight",
        "patch_embed.proj.bias",
        "class_tokens.tokens",
        "class_tokens.pos_embed",
    ]
    assert [groups[i] for i in (1, 2)] == [["blocks.0.scale"], ["blocks.1.scale"]]
    assert groups[3] == ["blocks.2.scale", "norm.weight"]


def test_gradient_checkpointing_changes_no_gradient(model):
    def gradients():
        model.zero_grad()
        F.cross_entropy(model(images()), torch.tensor([0, 3])).backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = gradients()
    calls = len(model.blocks[0].calls)
    model.set_grad_checkpointing()
    assert all(torch.equal(a, b) for a, b in zip(gradients(), wanted, strict=True))
    assert len(model.blocks[0].calls) == calls + 2  # once more in the backward pass


def test_set_input_size_interpolates_positions(model):
    tokens = model.class_tokens.pos_embed.detach().clone()
    model.set_input_size((16, 48))
    assert model.pos_embed.shape == (1, 12, 32)
    assert torch.equal(model.class_tokens.pos_embed, tokens)
    model.set_input_size((32, 32), 4)
    assert model.pos_embed.shape == (1, 64, 32)
    assert [info["reduction"] for info in model.feature_info] == [4] * 3
    assert model(images()).shape == (2, 5)


def test_torch_fx_traces_for_any_size(model):
    graph = fx.symbolic_trace(model)
    for size in ((32, 32), (24, 40)):
        assert_close(graph(images(2, 3, *size)), model(images(2, 3, *size)), 1e-6)


def test_exports_for_any_batch_and_size(model):
    batch, height, width = (torch.export.Dim(name, min=2, max=64) for name in ("b", "h", "w"))
    program = torch.export.export(
        model, (images(3, 3, 40, 48),), dynamic_shapes=({0: batch, 2: 8 * height, 3: 8 * width},)
    ).module()
    for shape in ((3, 3, 40, 48), (2, 3, 64, 24)):
        assert_close(program(images(*shape)), model(images(*shape)), 1e-5)


def test_a_size_below_a_patch_is_refused_before_anything_changes():
    model = create_model("vittt_nano_patch4_32", depth=1)
    with pytest.raises(ValueError, match=r"images of 2 × 2 are not whole patches of 4 × 4"):
        model.set_input_size(2)
    with pytest.raises(ValueError, match="img_size is 0; accepted: 1 to"):
        model.set_input_size(0)
    assert model.pos_embed.shape[1] == 64


@pytest.mark.parametrize(
    "name", ["vittt_nano_patch4_32", "vim_nano_patch4_32", "vit3_nano_patch4_32"]
)
@pytest.mark.parametrize(("size", "sides"), [(18, (5, 5)), ((30, 17), (8, 5)), (3, (1, 1))])
def test_the_own_grid_of_a_model_that_pads_is_that_of_its_padded_images(name, size, sides):
    model = create_model(name, depth=1, img_size=size, dynamic_img_pad=True, num_classes=5)
    resized = create_model(name, depth=1, dynamic_img_pad=True, num_classes=5)
    resized.set_input_size(size)
    for each in (model.eval(), resized.eval()):
        assert each.patch_embed.grid_size == sides
        assert each.pos_embed is None or each.pos_embed.shape[1] == sides[0] * sides[1]
        x = images(1, 3, *each.patch_embed.img_size)
        assert each.blocks.own_context in (None, each.embed(x)[1])
        assert each(x).shape == (1, 5)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 0, 32), (1, 3, 32, 0)])
def test_images_without_pixels_are_refused(shape, pad):
    options = {"depth": 1, "dynamic_img_size": True, "dynamic_img_pad": pad}
    with pytest.raises(ValueError, match=r"images must be \[B, 3, H, W\], got \[1, 3, "):
        create_model("vittt_nano_patch4_32", **options)(images(*shape))


def test_a_list_of_images_is_refused():
    with pytest.raises(TypeError, match=r"must be a tensor \[B, 3, H, W\], got a list"):
        create_model("vittt_nano_patch4_32", depth=1)([*images(2, 3, 32, 32)])
