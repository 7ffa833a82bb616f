"""ViT-Adapter: its size and cost, its maps, and what it does to the backbone that it is given."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tolerances import assert_close
from vision_ttt.bench import count_macs
from vision_ttt.dense import ViTAdapter
from vision_ttt.dense.interaction import Injector, Layout
from vision_ttt.models import create_model

PUBLISHED = {
    "vittt_tiny_patch16_224": (2_438_192, 9_224_888, 74.3e9, 18.1e9),
    "vittt_small_patch16_224": (5_830_160, 31_817_120, 206.3e9, 50.3e9),
    "vittt_base_patch16_224": (13_680_608, 115_309_952, 646.7e9, 157.7e9),
}
"""Parameters of the adapter, and with the backbone; multiply-adds at 1333 × 800 and 512².

Vision-TTT, Table 2. For T at 512² it is 74.3G by the number of tokens: the table's 17.8G disagrees.
"""


def nano(**arguments):
    """A Vittt of 4 blocks and 48 channels, for patches of 8 pixels."""
    small = {"img_size": 64, "patch_size": 8, "embed_dim": 48, **arguments}
    return create_model("vittt_nano_patch4_32", dynamic_img_size=True, **small)


def adapter(backbone=None, **arguments):
    """An adapter with random weights everywhere, so that nothing is multiplied by zero."""
    torch.manual_seed(0)
    model = ViTAdapter(nano() if backbone is None else backbone, conv_width=8, **arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for norm in model.norms:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters(name):
    own, together, *_ = PUBLISHED[name]
    with torch.device("meta"):
        model = ViTAdapter(name)
        count = sum(parameter.numel() for parameter in model.parameters())
        backbone = sum(parameter.numel() for parameter in model.backbone.parameters())
        assert (count - backbone, count) == (own, together)


@pytest.mark.parametrize(
    "name",
    [
        "vittt_small_patch16_224",
        pytest.param("vittt_tiny_patch16_224", marks=pytest.mark.slow),
        pytest.param("vittt_base_patch16_224", marks=pytest.mark.slow),
    ],
)
def test_the_multiply_adds(name):
    *_, at_1333, at_512 = PUBLISHED[name]
    with torch.device("meta"):
        model = ViTAdapter(name)
        assert count_macs(model, (3, 512, 512)) == pytest.approx(at_512, rel=0.03)
        assert count_macs(model, (3, 800, 1333)) == pytest.approx(at_1333, rel=0.03)


@pytest.mark.parametrize("size", [(64, 64), (45, 70), (1, 33)])
@pytest.mark.parametrize("patch", [4, 8, 14])
def test_maps_of_any_size(size, patch):
    model = adapter(nano(patch_size=patch, img_size=4 * patch, depth=4))
    assert model.channels == (48,) * 4
    assert model.strides == (4, 8, 16, 32)
    maps = model(torch.randn(2, 3, *size))
    assert [tuple(x.shape) for x in maps] == [
        (2, 48, -(-size[0] // stride), -(-size[1] // stride)) for stride in (4, 8, 16, 32)
    ]


def test_padding_changes_nothing_but_the_size():
    model, images = adapter().eval(), torch.randn(2, 3, 50, 70)
    padded = F.pad(images, (0, 96 - 70, 0, 64 - 50))
    with torch.no_grad():
        for got, wanted in zip(model(images), model(padded), strict=True):
            assert_close(got, wanted[:, :, : got.shape[2], : got.shape[3]], 1e-6)


def read(attention, queries, places, tokens, grids):
    """Deformable attention by the equation, a level, a point and a head at a time."""
    heads, levels, points = attention.heads, attention.levels, attention.points
    sampling = attention.sampling(queries)
    offsets, logits = sampling.split((2 * heads * levels * points, heads * levels * points), -1)
    offsets = offsets.unflatten(-1, (heads, levels, points, 2))
    weights = logits.unflatten(-1, (heads, -1)).softmax(-1).unflatten(-1, (levels, points))
    maps = attention.value(tokens).split([h * w for h, w in grids], dim=1)
    out = []
    for head in range(heads):
        total = 0
        for level, (h, w) in enumerate(grids):
            value = maps[level].unflatten(-1, (heads, -1))[:, :, head]
            value = value.transpose(1, 2).unflatten(-1, (h, w))  # [B, d, h, w]
            for point in range(points):
                at = places + offsets[:, :, head, level, point] / torch.tensor([w, h])
                sampled = F.grid_sample(value, 2 * at[:, :, None] - 1, align_corners=False)
                total += weights[:, :, head, level, point, None] * sampled[..., 0].transpose(1, 2)
        out.append(total)
    return attention.out(torch.cat(out, -1))


def test_the_maps_are_those_of_the_equations():
    model = adapter(heads=3, points=2).double().eval()
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    grids, grid = [(16, 24), (8, 12), (4, 6), (2, 3)], (8, 12)
    layout = Layout.of(grid, tuple(grids[1:]), images)
    x, context = model.backbone.embed(images)
    finest, *levels = model.prior(images)
    c = torch.cat([y + e for y, e in zip(levels, model.level_embed, strict=True)], dim=1)
    groups = []
    for index, interaction in enumerate(model.interactions):
        injector = interaction.injector
        x = x + injector.gamma * read(
            injector.attention,
            *(injector.query_norm(x), layout.grid_places, injector.value_norm(c), grids[1:]),
        )
        x = model.backbone.blocks[index](x, *context)
        groups.append(x)
        assert len(interaction.extractors) == (3 if index == 3 else 1)
        for extractor in interaction.extractors:
            c = c + read(
                extractor.attention,
                *(extractor.query_norm(c), layout.level_places, extractor.value_norm(x), [grid]),
            )
            ffn, hidden = extractor.ffn, []
            for y, (h, w) in zip(
                ffn.fc1(extractor.norm(c)).split([h * w for h, w in grids[1:]], 1),
                grids[1:],
                strict=True,
            ):
                y = y.transpose(1, 2).unflatten(-1, (h, w))
                y = F.conv2d(y, ffn.conv.weight, ffn.conv_bias, padding=1, groups=y.shape[1])
                hidden.append(y.flatten(2).transpose(1, 2))
            c = c + ffn.fc2(F.gelu(torch.cat(hidden, 1)))
    c = [finest, *c.split([h * w for h, w in grids[1:]], dim=1)]
    c = [y.transpose(1, 2).unflatten(-1, own) for y, own in zip(c, grids, strict=True)]
    c[0] = c[0] + model.up(c[1])
    for got, y, tokens, own, norm in zip(model(images), c, groups, grids, model.norms, strict=True):
        tokens = tokens.transpose(1, 2).unflatten(-1, grid)
        wanted = norm(y + F.interpolate(tokens, own, mode="bilinear", align_corners=False))
        assert_close(got, wanted, 1e-10)


def test_the_spatial_prior_by_pytorchs_layers():
    prior = adapter().prior.eval()
    images = torch.randn(2, 3, 64, 96)
    x = images
    for part in prior.stem[:3]:
        x = part.norm(part.conv(x)).relu()
    x = F.max_pool2d(x, 3, 2, 1)
    for index, tokens in enumerate(prior(images)):
        if index:
            part = prior.stages[index - 1]
            x = part.norm(F.conv2d(x, part.conv.weight, stride=2, padding=1)).relu()
        project = prior.projections[index]
        wanted = F.conv2d(x, project.weight[:, :, None, None], project.bias)
        assert_close(tokens, wanted.flatten(2).transpose(1, 2), 1e-5)


def blocks_outputs(model, call):
    outputs = []
    hooks = [
        block.register_forward_hook(lambda _block, _inputs, out: outputs.append(out))
        for block in model.blocks
    ]
    with torch.no_grad():
        call()
    for hook in hooks:
        hook.remove()
    return outputs


def test_a_fresh_adapter_leaves_the_backbones_tokens_alone():
    torch.manual_seed(0)
    model, images = ViTAdapter(nano(), conv_width=8).eval(), torch.randn(1, 3, 64, 64)
    alone = blocks_outputs(model.backbone, lambda: model.backbone(images))
    inside = blocks_outputs(model.backbone, lambda: model(images))
    assert len(inside) == len(alone) == 4
    assert all(torch.equal(got, wanted) for got, wanted in zip(inside, alone, strict=True))
    for interaction in model.interactions:
        nn.init.ones_(interaction.injector.gamma)
    injected = blocks_outputs(model.backbone, lambda: model(images))
    assert not torch.allclose(injected[0], alone[0], atol=1e-3)


def test_class_tokens_are_in_the_blocks_and_not_in_the_maps():
    model = adapter(nano(global_pool="double")).eval()
    lengths = []
    for module in (*model.backbone.blocks, *(each.injector for each in model.interactions)):
        module.register_forward_pre_hook(lambda _m, inputs: lengths.append(inputs[0].shape[1]))
    images = torch.randn(2, 3, 64, 64)
    maps = model(images)
    assert sorted(lengths) == [64] * 4 + [66] * 4
    nn.init.zeros_(model.backbone.class_tokens.tokens)
    assert not torch.allclose(model(images)[3], maps[3], atol=1e-4)  # they took part


def test_gradients_reach_every_parameter_and_image_and_checkpointing_changes_none():
    # In training mode BatchNorm removes constants: biases before it have no gradient.
    model = adapter(nano(global_pool="head")).eval()
    images = torch.randn(2, 3, 40, 64, requires_grad=True)
    probes = [torch.randn_like(x) for x in model(images)]

    def gradients():
        loss = sum((x * probe).sum() for x, probe in zip(model(images), probes, strict=True))
        return torch.autograd.grad(loss, [images, *model.parameters()])

    plain = gradients()
    for name, x in zip(["images", *dict(model.named_parameters())], plain, strict=True):
        assert x.abs().max() > 1e-4, name
    runs = []
    for part in (model.interactions[0].injector, model.interactions[3].extractors[1]):
        part.register_forward_pre_hook(lambda part, _: runs.append(part))
    model.set_grad_checkpointing()
    for got, wanted in zip(gradients(), plain, strict=True):
        assert_close(got, wanted, 1e-4)
    assert len(runs) == 4  # once more in the backward pass


def test_the_groups_of_blocks():
    def ends(depth, **arguments):
        backbone = nano(depth=depth, embed_dim=24, num_heads=1)
        return [stop - 1 for _, stop in adapter(backbone, **arguments).groups]

    assert ends(4) == [0, 1, 2, 3]
    assert ends(12) == [2, 5, 8, 11]
    assert ends(6) == [0, 2, 3, 5]
    assert ends(6, interactions=(2, 3, 4, 5)) == [2, 3, 4, 5]
    for wrong in [(0, 1, 2, 3), (1, 2, 5), (2, 1, 4, 5), (-1, 1, 3, 5)]:
        with pytest.raises(ValueError, match="ascending up to 5"):
            ends(6, interactions=wrong)
    with pytest.raises(ValueError, match="3 blocks"):
        ends(3)


def test_weight_decay_and_copies():
    model = adapter(drop_path=0.1)
    names = model.no_weight_decay()
    assert {"level_embed", "backbone.pos_embed", "interactions.2.injector.gamma"} <= names
    assert names <= set(dict(model.named_parameters()))
    assert model.interactions[0].extractors[0].drop_path.drop_prob == 0.1
    images = torch.randn(1, 3, 32, 32)
    model.eval()
    with torch.no_grad():
        for got, wanted in zip(copy.deepcopy(model)(images), model(images), strict=True):
            assert torch.equal(got, wanted)


def test_stochastic_depth_drops_an_extractors_ffn():
    extractor = adapter(drop_path=0.1).interactions[0].extractors[0]
    levels, x = ((8, 12), (4, 6), (2, 3)), torch.randn(2, 24, 48)
    layout, pyramid = Layout.of((4, 6), levels, x), torch.randn(2, 126, 48)
    extractor.drop_path.drop_prob = 1.0
    dropped, whole = (extractor.train(mode)(pyramid, x, layout) for mode in (True, False))
    assert_close(whole - dropped, extractor.ffn(extractor.norm(dropped), levels), 1e-5)


def test_autocast_keeps_places_and_norms_in_float32():
    model, images = adapter().eval(), torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        wanted = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            for got, exact in zip(model(images), wanted, strict=True):
                assert_close(got, exact, 2e-2)


class Queries(nn.Module):
    """In the place of an attention, its queries."""

    def forward(self, queries, places, tokens, grids):
        return queries


def test_gradients_of_the_injectors_norm_are_float32_sums_under_autocast():
    """Without positions the first injector's tokens are a convolution's, in bfloat16."""
    injector, layout = Injector(Queries(), 16), Layout.of((64, 64), ((2, 2),), torch.empty(0))
    torch.nn.init.normal_(injector.gamma)
    x, pyramid, gradients = torch.randn(1, 4096, 16).bfloat16(), torch.randn(1, 4, 16), []
    for tokens, enabled in ((x.float(), False), (x, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = injector(tokens, pyramid, layout)
        weights = injector.query_norm.parameters()
        gradients.append(torch.autograd.grad((out.square() + out).sum(), weights))
    for wanted, got in zip(*gradients, strict=True):
        assert_close(got, wanted, 2e-2)


@pytest.mark.slow
def test_one_graph_with_gradients():
    torch.compiler.reset()
    model, images = adapter().double().eval(), torch.randn(1, 3, 40, 64, dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    probes = [torch.randn_like(x) for x in model(images)]
    gradients = []
    for each in (model, compiled):
        loss = sum((x * probe).sum() for x, probe in zip(each(images), probes, strict=True))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    names = dict(model.named_parameters())
    for name, got, wanted in zip(names, *reversed(gradients), strict=True):
        assert_close(got, wanted, 1e-8, name)


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"must be plain.*got HViT3"):
        ViTAdapter(create_model("hvit3_tiny", depths=(1, 1, 1, 1)))
    with pytest.raises(RuntimeError, match="vittt_gigantic"):
        ViTAdapter("vittt_gigantic")
    with pytest.raises(ValueError, match="dynamic_img_size"):
        ViTAdapter(create_model("vittt_nano_patch4_32"))
    for wrong, named in [
        ({"heads": 5}, "5 heads do not divide"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"points": 0}, "points must be at least 1"),
        ({"conv_width": 0}, "conv_width must be at least 1"),
        ({"ratio": 0.01}, "6 heads do not divide"),
        ({"mlp_ratio": 0.0}, "mlp_ratio"),
        ({"drop_path": 1.0}, "drop_path"),
    ]:
        with pytest.raises(ValueError, match=named):
            ViTAdapter(nano(), **wrong)
    model = ViTAdapter(nano(), conv_width=8)
    for shape in [(3, 64, 64), (1, 4, 64, 64), (1, 3, 0, 64)]:
        with pytest.raises(ValueError, match=r"images must be \[B, 3, H, W\]"):
            model(torch.zeros(shape))
